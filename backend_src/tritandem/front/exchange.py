"""One HTTP request and its response, over ASGI: bounded reading, whole bodies, events, the client's leaving.

Knows nothing about what is said. Belongs to one event loop; a send waits while the client reads slowly, and what is
not sent is not asked for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from .errors import ApiError, ClientGone

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 10.0  # a comment, when nothing else was sent for that long
KEEP_ALIVE = b": waiting\n\n"
JSON, EVENTS = "application/json", "text/event-stream; charset=utf-8"


class Exchange:
    def __init__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self._fields: dict[bytes, bytes] = dict(scope["headers"])
        self._receive, self._send = receive, send
        self.headers: dict[str, str] = {}  # of the response, whatever it will be
        self.status = 0  # 0: not begun
        self._sent_s = time.monotonic()
        self._sending = False

    def header(self, name: str) -> str | None:
        value = self._fields.get(name.encode())
        return None if value is None else value.decode("latin-1")

    async def read_body(self, max_bytes: int) -> bytes:
        """Raises ApiError: 413 for a long one, 408 for a slow one, 499 when the client leaves over it."""
        length = self.header("content-length") or "0"
        if length.isdigit() and int(length) > max_bytes:
            raise _too_long(max_bytes)
        try:
            return await asyncio.wait_for(self._read(max_bytes), BODY_TIMEOUT_S)
        except asyncio.TimeoutError:
            raise ApiError(408, f"body: not complete after {BODY_TIMEOUT_S:.0f} s", param="body") from None

    async def _read(self, max_bytes: int) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            body += message.get("body", b"")
            if len(body) > max_bytes:
                raise _too_long(max_bytes)
            if not message.get("more_body"):
                return bytes(body)

    async def respond(self, status: int, body: bytes, content_type: str = JSON) -> None:
        await self._begin(status, {"content-type": content_type, "content-length": str(len(body))})
        await self._send({"type": "http.response.body", "body": body})

    async def event(self, data: bytes) -> None:
        """One or several events; begins the response with the first."""
        self._sending = True
        if not self.status:
            await self._begin(200, {"content-type": EVENTS, "cache-control": "no-cache", "x-accel-buffering": "no"})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_s, self._sending = time.monotonic(), False

    async def end_events(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data})

    async def gone(self, events: bool) -> None:
        """Returns once the client has left; keeps a stream of events alive until then."""
        while True:
            try:
                message = await asyncio.wait_for(self._receive(), KEEP_ALIVE_S)
            except asyncio.TimeoutError:
                silent_s = time.monotonic() - self._sent_s
                if events and not self._sending and silent_s >= KEEP_ALIVE_S:
                    await self.event(KEEP_ALIVE)
                continue
            if message["type"] == "http.disconnect":
                return

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.status = status
        listed = [(name.encode(), value.encode("latin-1")) for name, value in {**headers, **self.headers}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": listed})


def _too_long(max_bytes: int) -> ApiError:
    said = f"body: given more than {max_bytes >> 20} MiB, allowed: at most that"
    return ApiError(413, said, param="body", code="body_too_large", headers={"connection": "close"})
