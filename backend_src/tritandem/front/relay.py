"""One request from the model to the client: asks each question n times, and sends what comes as it comes.

The first answer to a question begins alone: the others start with its first token and find its prompt in the prefix
cache. What a client does not take is not read from the model's stream either. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from tritandem_client import AsyncClient, AsyncStream, Chunk, Result, TokenLogprob

from .ask import Ask
from .chat_turns import ChatTurns
from .completions import scores_of_prompt, with_prompt
from .exchange import Exchange
from .formats.turn import Turn
from .shapes import DONE, Envelope, Shape, finish_reason, usage
from .tokenize import detokenize

Said = TypeVar("Said", Chunk, Result)


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
        self._begun = [asyncio.Event() for _ in ask.questions]
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
        ask = self._ask
        await self._read_echo()
        if len(ask.questions) == ask.n == 1:
            self.results = [await self._ask_once()]
        else:
            self.results = await _together([self._collect(index) for index in range(self._choices)])
        choices = [self._whole(index, result) for index, result in enumerate(self.results)]
        await exchange.respond(200, self._envelope.document(choices, usage(self.results, ask.n)))

    async def stream(self, exchange: Exchange) -> None:
        """Events, as the model speaks."""
        await self._read_echo()
        self.results = await _together([self._forward(index, exchange) for index in range(self._choices)])
        last = DONE
        if self._ask.include_usage:
            last = self._envelope.usage_event(usage(self.results, self._ask.n)) + DONE
        await exchange.end_events(last)

    @property
    def _choices(self) -> int:
        return len(self._ask.questions) * self._ask.n

    async def _read_echo(self) -> None:
        """The texts of prompts that are to be repeated."""
        for number, question in enumerate(self._ask.questions if self._ask.echo else ()):
            if "prompt" in question:
                self._echo[number] = question["prompt"]
            else:
                request_id = f"{self._options['request_id']}-echo-{number}"
                said = await detokenize(self._client, {"tokens": question["input_ids"]}, request_id, None)
                self._echo[number] = said["prompt"]

    def _settings(self, index: int) -> dict[str, Any]:
        settings = {
            **self._ask.options_of(index),
            **self._options,
            "request_id": f"{self._options['request_id']}{f'-{index}' if index else ''}",
        }
        if index % self._ask.n:
            settings.pop("prompt_logprobs", None)  # the first answer to the question brings them
        return settings

    def _note(self, index: int, said: Chunk) -> Chunk:
        """What of it is for the client."""
        question = index // self._ask.n
        self._prompts[question] = self._prompts[question] or said.prompt_logprobs
        self._begun[question].set()
        return said if self._ask.answered else _prompt_alone(said)

    async def _ask_once(self) -> Result:
        question: dict[str, Any] = dict(self._ask.questions[0])
        ask = self._client.chat if "messages" in question else self._client.generate
        result = await ask(**question, **self._settings(0))
        self._prompts[0] = result.prompt_logprobs
        return result if self._ask.answered else _prompt_alone(result)

    def _open(self, index: int) -> AsyncStream:
        question: dict[str, Any] = dict(self._ask.questions[index // self._ask.n])
        ask = self._client.chat_stream if "messages" in question else self._client.stream
        stream = ask(**question, **self._settings(index))
        self._streams.append(stream)
        return stream

    async def _wait_for_first(self, index: int) -> None:
        if index % self._ask.n:
            await self._begun[index // self._ask.n].wait()

    async def _collect(self, index: int) -> Result:
        await self._wait_for_first(index)
        async with self._open(index) as answer:
            async for chunk in answer:
                self._note(index, chunk)
        return answer.result if self._ask.answered else _prompt_alone(answer.result)

    async def _forward(self, index: int, exchange: Exchange) -> Result:
        await self._wait_for_first(index)
        shape, event = self._shape, self._envelope.event
        opening = shape.opening(index)
        before = event([opening]) if opening else b""
        offset, begun = 0, False
        turn = self._turns.open() if self._turns else None
        async with self._open(index) as answer:
            async for chunk in answer:
                said = self._note(index, chunk)
                if self._ask.echo and not begun:
                    before += event([self._with_prompt(index, shape.piece(index, "", None, 0, 0))])
                    offset = len(self._echo[index // self._ask.n])
                begun = True
                data = before + self._events_of(said, index, offset, turn)
                before, offset = b"", offset + len(said.text)
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
                choices.append(self._turns.ending(index, turn, finish_reason(chunk.finish_reason)))
            return b"".join(event([choice]) for choice in choices)
        if chunk.text or logprobs:
            data = event([shape.piece(index, chunk.text, logprobs, self._ask.logprobs or 0, offset)])
        if chunk.finish_reason is not None:
            data += event([shape.ending(index, finish_reason(chunk.finish_reason))])
        return data

    def _with_prompt(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        """The choice of a completion, behind the prompt that it repeats."""
        question, ask = index // self._ask.n, self._ask
        echo, prompt = self._echo[question], self._prompts[question]
        if ask.logprobs is not None:
            choice["logprobs"] = with_prompt(choice["logprobs"], prompt, echo, ask.logprobs)
        return {**choice, "text": echo + choice["text"]}

    def _whole(self, index: int, result: Result) -> dict[str, Any]:
        choice = self._choice(index, result)
        if self._ask.echo:
            choice = self._with_prompt(index, choice)
        if self._ask.scored_prompt:
            choice["prompt_logprobs"] = scores_of_prompt(self._prompts[index // self._ask.n])
        return choice

    def _choice(self, index: int, result: Result) -> dict[str, Any]:
        logprobs = None if self._ask.logprobs is None else result.logprobs
        reason = finish_reason(result.finish_reason)
        if self._turns:
            return self._turns.whole(index, result.text, reason, logprobs, self._ask.logprobs or 0)
        offset = len(self._echo[index // self._ask.n])
        return self._shape.whole(index, result.text, reason, logprobs, self._ask.logprobs or 0, offset)


def _prompt_alone(said: Said) -> Said:
    """Without the one token that the model had to say."""
    reason = said.finish_reason and "length"
    return replace(said, text="", num_output_tokens=0, logprobs=(), finish_reason=reason)


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
