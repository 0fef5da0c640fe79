"""Speaks ASGI with the application, as a server would; raises on what no server would take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tritandem.front.app import App


@dataclass
class Reply:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    ended: bool = False

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Documents of the events, the last of which must be [DONE]; comments are left out."""
        parts = [part for part in self.body.decode().split("\n\n") if not part.startswith(":")]
        assert parts.pop() == ""
        assert all(part.startswith("data: ") for part in parts)
        assert parts.pop() == "data: [DONE]"
        return [json.loads(part[6:]) for part in parts]


class Visit:
    """One request. `leave()` is the client going away; `slow` makes every send wait for `read.set()`."""

    def __init__(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None) -> None:
        self.reply = Reply()
        self.arrived = asyncio.Event()  # something of the body was sent
        self.read = asyncio.Event()
        self.read.set()
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        self._messages: asyncio.Queue[Any] = asyncio.Queue()
        self._messages.put_nowait({"type": "http.request", "body": data, "more_body": False})
        lines = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        self.scope = {"type": "http", "method": method, "path": path, "headers": lines}

    def hold_body(self) -> None:
        """Its end never comes."""
        self._messages.put_nowait({**self._messages.get_nowait(), "more_body": True})

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def send(self, message: Any) -> None:
        reply = self.reply
        assert not reply.ended, "something after the end"
        if message["type"] == "http.response.start":
            assert not reply.status, "begun twice"
            reply.status = message["status"]
            reply.headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
            return
        assert message["type"] == "http.response.body"
        assert reply.status
        reply.body += message["body"]
        reply.ended = not message.get("more_body", False)
        self.arrived.set()
        await self.read.wait()

    async def run(self, app: App) -> Reply:
        await app(self.scope, self._messages.get, self.send)
        return self.reply
