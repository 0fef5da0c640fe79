"""One request from the model to the client: asks each question n times, and sends what comes as it comes.

The first answer to a question begins alone: the others start with its first token and find its prompt in the prefix
cache. What a client does not take is not read from the model's stream either. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any

from tritandem_client import AsyncClient, AsyncStream, Chunk, Result

from .ask import Ask
from .chat_turns import ChatTurns
from .exchange import Exchange
from .formats.turn import Turn
from .shapes import DONE, Envelope, Shape, finish_reason, usage


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
        self.results: list[Result] = []
        self._streams: list[AsyncStream] = []

    @property
    def heard(self) -> list[Result]:
        """What came of the answers, also of those that were broken off."""
        return self.results or received(self._streams)

    async def answer(self, exchange: Exchange) -> None:
        """All of it in one piece."""
        ask = self._ask
        if len(ask.questions) == ask.n == 1:
            self.results = [await self._ask_once()]
        else:
            self.results = await _together([self._collect(index) for index in range(self._choices)])
        choices = [self._whole(index, result) for index, result in enumerate(self.results)]
        await exchange.respond(200, self._envelope.document(choices, usage(self.results, ask.n)))

    async def stream(self, exchange: Exchange) -> None:
        """Events, as the model speaks."""
        self.results = await _together([self._forward(index, exchange) for index in range(self._choices)])
        last = DONE
        if self._ask.include_usage:
            last = self._envelope.usage_event(usage(self.results, self._ask.n)) + DONE
        await exchange.end_events(last)

    @property
    def _choices(self) -> int:
        return len(self._ask.questions) * self._ask.n

    def _settings(self, index: int) -> dict[str, Any]:
        return {
            **self._ask.options_of(index),
            **self._options,
            "request_id": f"{self._options['request_id']}{f'-{index}' if index else ''}",
        }

    async def _ask_once(self) -> Result:
        question: dict[str, Any] = dict(self._ask.questions[0])
        ask = self._client.chat if "messages" in question else self._client.generate
        return await ask(**question, **self._settings(0))

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
            async for _ in answer:
                self._begun[index // self._ask.n].set()
        return answer.result

    async def _forward(self, index: int, exchange: Exchange) -> Result:
        await self._wait_for_first(index)
        begun, shape, event = self._begun[index // self._ask.n], self._shape, self._envelope.event
        opening = shape.opening(index)
        before = event([opening]) if opening else b""
        echo = self._ask.echo[index // self._ask.n]
        if echo:
            before += event([shape.piece(index, echo, None, 0, 0)])
        offset = len(echo)
        turn = self._turns.open() if self._turns else None
        async with self._open(index) as answer:
            async for chunk in answer:
                begun.set()
                data = before + self._events_of(chunk, index, offset, turn)
                before, offset = b"", offset + len(chunk.text)
                if data:
                    await exchange.event(data)
        return answer.result

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

    def _whole(self, index: int, result: Result) -> dict[str, Any]:
        echo = self._ask.echo[index // self._ask.n]
        logprobs = None if self._ask.logprobs is None else result.logprobs
        reason = finish_reason(result.finish_reason)
        if self._turns:
            return self._turns.whole(index, result.text, reason, logprobs, self._ask.logprobs or 0)
        return self._shape.whole(index, echo + result.text, reason, logprobs, self._ask.logprobs or 0, len(echo))


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
