"""HTTP/1.1 on one connection: uvicorn's, with bounds on headers in size and time, which it leaves to others."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
HEADER_TIMEOUT_S = 20.0


class BoundedHttp(HttpToolsProtocol):  # type: ignore[misc]
    """A connection on which no request's headers are complete in time is closed; one whose headers are too long gets
    a 400 before that."""

    _late: asyncio.TimerHandle | None = None
    _unread_bytes = 0  # of headers that are not complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._late is not None:
            self._unread_bytes += len(data)
            if self._unread_bytes > MAX_HEADER_BYTES and not self.transport.is_closing():
                self.send_400_response("Headers are too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._expect_headers()

    def on_headers_complete(self) -> None:
        self._headers_came()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_came()
        super().connection_lost(exc)

    def _expect_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)

    def _headers_came(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late, self._unread_bytes = None, 0
