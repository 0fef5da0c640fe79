"""One question, one answer, told by a narrator: the relay of /v1/responses and /v1/messages.

As `relay.py`, it belongs to one event loop, and reads from the model only what the client takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tritandem_client import AsyncClient, AsyncStream, Result

from .ask import Ask
from .exchange import Exchange
from .formats.turn import Turn
from .narrator import Narrator, Telling, as_bytes
from .relay import received
from .shapes import finish_reason


class Monologue:
    """`options`: of the client, beside those of the body. Both ways of answering raise TritandemClientError."""

    def __init__(
        self, ask: Ask, turn: Turn, narrator: Narrator, client: AsyncClient, options: Mapping[str, Any]
    ) -> None:
        self._turn, self._narrator, self._client = turn, narrator, client
        self._messages = ask.questions[0]["messages"]
        self._options: dict[str, Any] = {**ask.options, **options}
        self._telling = Telling(narrator)
        self.results: list[Result] = []
        self._streams: list[AsyncStream] = []

    @property
    def heard(self) -> list[Result]:
        """What came of the answer, also of one that was broken off."""
        return self.results or received(self._streams)

    async def answer(self, exchange: Exchange) -> None:
        """All of it in one piece."""
        result = await self._client.chat(self._messages, **self._options)
        as_bytes(self._narrator.begin())
        as_bytes(self._telling.tell([*self._turn.feed(result.text), *self._turn.end()]))
        self._end(result)
        await exchange.respond(200, json.dumps(self._narrator.document()).encode())

    async def stream(self, exchange: Exchange) -> None:
        """Events, as the model speaks; the first waits for the model's first word, as a refusal needs its status."""
        before = as_bytes(self._narrator.begin())
        async with self._client.chat_stream(self._messages, **self._options) as answer:
            self._streams.append(answer)
            async for chunk in answer:
                if data := before + as_bytes(self._telling.tell(self._turn.feed(chunk.text))):
                    await exchange.event(data)
                before = b""
        last = as_bytes(self._telling.tell(self._turn.end())) + self._end(answer.result)
        if before:
            await exchange.event(before)
        await exchange.end_events(last)

    def _end(self, result: Result) -> bytes:
        self.results = [result]
        events = as_bytes(self._telling.close())
        reason = finish_reason(result.finish_reason)
        return events + as_bytes(self._narrator.end(reason, result, bool(self._turn.calls)))
