"""One request from the model to the client: asks each question once, for n answers, and sends what comes as it comes.

What a client does not take is not read from the model's stream either. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from tritandem_client import AsyncClient, AsyncStream, Choice, Chunk, Result, TokenLogprob

from .ask import Ask
from .chat_turns import ChatTurns
from .completions import scores_of_prompt, with_prompt
from .errors import ApiError
from .exchange import Exchange
from .formats.turn import Turn
from .shapes import DONE, Envelope, Shape, finish_reason, stop_reason, usage
from .tokenize import detokenize

Heard = TypeVar("Heard", Chunk, Result)
Said = TypeVar("Said", Chunk, Choice, Result)


class Relay:
    """`options`: of the client, beside those of the body. `turns`: how answers are read, None: as they stand. Both ways
    of answering raise TritandemClientError."""

    def __init__(
        self,
        ask: Ask,
        shape: Shape,
        envelope: Envelope,
        client: AsyncClient,
        options: Mapping[str, Any],
        turns: ChatTurns | None = None,
    ) -> None:
        self._turns = turns
        self._ask, self._shape, self._envelope, self._client, self._options = ask, shape, envelope, client, options
        self._echo = [""] * len(ask.questions)
        self._prompts: list[tuple[TokenLogprob, ...]] = [()] * len(ask.questions)
        self.results: list[Result] = []
        self._streams: list[AsyncStream] = []

    @property
    def heard(self) -> list[Result]:
        """What came of the answers, also of those that were broken off."""
        return self.results or received(self._streams)

    async def answer(self, exchange: Exchange) -> None:
        """All of it in one piece."""
        await self._read_echo()
        self.results = await _together([self._collect(number) for number in range(len(self._ask.questions))])
        choices = [self._whole(index, choice) for index, choice in enumerate(self._answers())]
        await exchange.respond(200, self._envelope.document(choices, usage(self.results)))

    async def stream(self, exchange: Exchange) -> None:
        """Events, as the model speaks."""
        await self._read_echo()
        numbers = range(len(self._ask.questions))
        self.results = await _together([self._forward(number, exchange) for number in numbers])
        last = DONE
        if self._ask.include_usage:
            last = self._envelope.usage_event(usage(self.results)) + DONE
        await exchange.end_events(last)

    def _answers(self) -> list[Result | Choice]:
        """Those for the client, `n` to each question: of more, the likeliest by the mean over their tokens."""
        shown: list[Result | Choice] = []
        for result in self.results:
            answers: list[Result | Choice] = [*(result.choices or (result,))]
            if len(answers) > self._ask.n:
                answers.sort(key=_mean_logprob, reverse=True)
            shown += answers[: self._ask.n]
        return shown

    async def _read_echo(self) -> None:
        """The texts of prompts that are to be repeated."""
        for number, question in enumerate(self._ask.questions if self._ask.echo else ()):
            if "prompt" in question:
                self._echo[number] = question["prompt"]
            else:
                request_id = f"{self._options['request_id']}-echo-{number}"
                try:
                    said = await detokenize(self._client, {"tokens": question["input_ids"]}, request_id, None)
                except ApiError as error:
                    error.rename(lambda _: "prompt")
                    raise
                self._echo[number] = said["prompt"]

    def _settings(self, number: int) -> dict[str, Any]:
        request_id = f"{self._options['request_id']}{f'-{number}' if number else ''}"
        return {**self._ask.options, **self._options, "request_id": request_id}

    def _note(self, number: int, said: Heard) -> Heard:
        """What of it is for the client."""
        self._prompts[number] = self._prompts[number] or said.prompt_logprobs
        return said if self._ask.answered else _prompt_alone(said)

    async def _collect(self, number: int) -> Result:
        question: dict[str, Any] = dict(self._ask.questions[number])
        ask = self._client.chat if "messages" in question else self._client.generate
        return self._note(number, await ask(**question, **self._settings(number)))

    def _open(self, number: int) -> AsyncStream:
        question: dict[str, Any] = dict(self._ask.questions[number])
        ask = self._client.chat_stream if "messages" in question else self._client.stream
        stream = ask(**question, **self._settings(number))
        self._streams.append(stream)
        return stream

    async def _forward(self, number: int, exchange: Exchange) -> Result:
        shape, event, n = self._shape, self._envelope.event, self._ask.n
        offsets: list[int | None] = [None] * n  # characters of each answer so far; None: not begun
        turns = [self._turns.open() if self._turns else None for _ in range(n)]
        async with self._open(number) as answer:
            async for chunk in answer:
                said, at = self._note(number, chunk), chunk.index
                index, data, offset = number * n + at, b"", offsets[at]
                if offset is None:
                    opening, offset = shape.opening(index), 0
                    data = event([opening]) if opening else b""
                    if self._ask.echo:
                        data += event([self._with_prompt(index, shape.piece(index, "", None, 0, 0))])
                        offset = len(self._echo[number])
                data += self._events_of(said, index, offset, turns[at])
                offsets[at] = offset + len(said.text)
                if data:
                    await exchange.event(data)
        return answer.result if self._ask.answered else _prompt_alone(answer.result)

    def _events_of(self, chunk: Chunk, index: int, offset: int, turn: Turn | None) -> bytes:
        shape, event, data = self._shape, self._envelope.event, b""
        logprobs = None if self._ask.logprobs is None else chunk.logprobs
        if turn is not None and self._turns is not None:
            ended = chunk.finish_reason is not None
            parts = [*turn.feed(chunk.text), *(turn.end() if ended else ())]
            choices = self._turns.choices(index, parts, logprobs, self._ask.logprobs or 0)
            if ended:
                choices.append(self._turns.ending(index, turn, finish_reason(chunk.finish_reason)) | stop_reason(chunk))
            return b"".join(event([choice]) for choice in choices)
        if chunk.text or logprobs:
            data = event([shape.piece(index, chunk.text, logprobs, self._ask.logprobs or 0, offset)])
        if chunk.finish_reason is not None:
            data += event([shape.ending(index, finish_reason(chunk.finish_reason)) | stop_reason(chunk)])
        return data

    def _with_prompt(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        """The choice of a completion, behind the prompt that it repeats."""
        question, ask = index // self._ask.n, self._ask
        echo, prompt = self._echo[question], self._prompts[question]
        if ask.logprobs is not None:
            choice["logprobs"] = with_prompt(choice["logprobs"], prompt, echo, ask.logprobs)
        return {**choice, "text": echo + choice["text"]}

    def _whole(self, index: int, result: Result | Choice) -> dict[str, Any]:
        choice = self._choice(index, result)
        if self._ask.echo:
            choice = self._with_prompt(index, choice)
        if self._ask.scored_prompt:
            choice["prompt_logprobs"] = scores_of_prompt(self._prompts[index // self._ask.n])
        return choice

    def _choice(self, index: int, result: Result | Choice) -> dict[str, Any]:
        logprobs = None if self._ask.logprobs is None else result.logprobs
        reason = finish_reason(result.finish_reason)
        top, told = self._ask.logprobs or 0, stop_reason(result)
        if self._turns:
            return self._turns.whole(index, result.text, reason, logprobs, top) | told
        offset = len(self._echo[index // self._ask.n])
        return self._shape.whole(index, result.text, reason, logprobs, top, offset) | told


def _prompt_alone(said: Said) -> Said:
    """Without the one token that the model had to say."""
    reason = said.finish_reason and "length"
    alone = replace(said, text="", num_output_tokens=0, logprobs=(), finish_reason=reason, stop_reason=None)
    if isinstance(alone, Result):
        alone = replace(alone, choices=tuple(_prompt_alone(choice) for choice in alone.choices))
    return alone


def _mean_logprob(answer: Result | Choice) -> float:
    return sum(one.logprob or 0.0 for one in answer.logprobs) / max(1, len(answer.logprobs))


def received(streams: Sequence[AsyncStream]) -> list[Result]:
    """Of streams that have ended, those that failed left out."""
    results = []
    for stream in streams:
        with suppress(RuntimeError):
            results.append(stream.result)
    return results


async def _together(answers: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All of them; when one fails, the others are broken off."""
    if len(answers) == 1:
        return [await answers[0]]
    tasks = [asyncio.ensure_future(answer) for answer in answers]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
