"""HTTP/1.1 on one connection: uvicorn's, with the bounds in size and time that it leaves to others.

Headers, trailers, chunk lines and whatever else is no body are bounded; so is the time in which a request's headers
come, and in which a client takes what it is sent. Trailers are no headers; an upgrade is not taken. One event loop.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADER_BYTES = 64 << 10
HEADER_TIMEOUT_S = 20.0
STUCK_S = 60.0  # a client that takes nothing for that long has gone


MAX_PIPELINED = 16  # requests that wait for the one before; while more wait, nothing is read, not even a client's end
_FRAMING = (b"content-length", b"transfer-encoding")


class BoundedHttp(HttpToolsProtocol):  # type: ignore[misc]
    """A connection on which no request's headers are complete in time is closed; one whose headers are too long gets
    a 400 before that."""

    parser: Any
    _late: asyncio.TimerHandle | None = None
    _stuck: asyncio.TimerHandle | None = None
    _unread_bytes = 0  # since the last ones of a body, or the last complete headers
    _in_headers = False
    _head_is_known = False  # of a body that another parser goes on with
    _runs: Any = None  # the request that is answered now; `cycle` is the last one that came

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.parser = _Parser(self, self.parser)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._unread_bytes > MAX_HEADER_BYTES:
            self.send_400_response("Headers are too long.")
        elif self.cycle is not None and self.cycle.response_complete:  # the rest of a refused body, or nothing at all
            self._expect_headers()

    def on_message_begin(self) -> None:
        if self._head_is_known:
            return
        super().on_message_begin()
        self._in_headers = True
        self._expect_headers()

    def on_url(self, url: bytes) -> None:
        if self._in_headers:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._unread_bytes = 0
        if self._head_is_known:
            self._head_is_known = False
            return
        self._in_headers = False
        self._expect_no_headers()
        super().on_headers_complete()
        if len(self.pipeline) <= MAX_PIPELINED:
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stuck = self.loop.call_later(STUCK_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._take_heart()

    def timeout_keep_alive_handler(self) -> None:
        self.transport.abort()  # a close would wait for a client that does not read the end of its answer

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_no_headers()
        super().connection_lost(exc)
        self._take_heart()
        if self._runs is not None and not self._runs.response_complete:
            self._runs.disconnected = True
            self._runs.message_event.set()

    def body_parser(self) -> httptools.HttpRequestParser | None:
        """For what follows a request whose parser took it for complete: its body, if it has one."""
        framing = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name in _FRAMING]
        if not framing:
            return None
        self.cycle.more_body = self._head_is_known = True
        parser = httptools.HttpRequestParser(self)
        parser.feed_data(b"POST / HTTP/1.1\r\n%s\r\n" % b"".join(framing))
        return parser

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._runs = cycle
        super()._start_asgi_task(cycle, app)

    def _expect_headers(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.abort)

    def _expect_no_headers(self) -> None:
        if self._late is not None:
            self._late.cancel()
        self._late = None

    def _take_heart(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
        self._stuck = None


class _Parser:
    """httptools', which takes what follows the headers of a request with `Upgrade` for another protocol. Here none is
    spoken: what follows is the request's body, and then the next request."""

    def __init__(self, protocol: BoundedHttp, parser: httptools.HttpRequestParser) -> None:
        self._protocol, self._parser = protocol, parser

    def feed_data(self, data: bytes | memoryview) -> None:
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as end:
                data = memoryview(data)[end.args[0] :]
                self._parser = self._protocol.body_parser() or self._parser
                if not data:
                    return

    def __getattr__(self, name: str) -> Any:
        return getattr(self._parser, name)
