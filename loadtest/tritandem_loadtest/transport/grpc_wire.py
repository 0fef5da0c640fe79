"""gRPC over our own HTTP/2 connections: the fast transport. `grpc_io` is its slow twin and must agree with it.

Owns a small pool of connections. Runs in the greenlets of one thread; needs no monkey patching.
"""

from __future__ import annotations

import time
from contextlib import suppress
from urllib.parse import unquote

from gevent.lock import BoundedSemaphore

from .. import stamps
from ..dialects import Dialect
from . import grpc_messages
from .http2 import ConnectionLost, Http2Connection
from .interface import Call, Decoded, Exchange


class WireTransport:
    """`url` is HOST:PORT, optionally with grpc:// in front; plain text only."""

    def __init__(self, url: str, dialect: Dialect, model: str, connections: int, ignore_eos: bool) -> None:
        host, _, port = url.removeprefix("grpc://").rstrip("/").rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._dialect, self._model, self._ignore_eos = dialect, model, ignore_eos
        self._pool: list[Http2Connection | None] = [None] * connections
        self._turn = 0
        self._connecting = BoundedSemaphore()

    def open(self) -> None:
        with suppress(OSError):
            for _ in self._pool:
                self._next_connection()

    def exchange(self, call: Call, timeout_s: float) -> Exchange:
        body = grpc_messages.encode(call, self._dialect, self._model, self._ignore_eos)
        result = Exchange(sent_ns=time.monotonic_ns())
        try:
            connection = self._next_connection()
            stream = connection.start(grpc_messages.STREAM_PATH, body, timeout_s)
        except (OSError, ConnectionLost) as error:
            result.end_ns = time.monotonic_ns()
            result.outcome, result.error = stamps.UNREACHABLE, str(error)
            return result
        ended = stream.done.wait(max(0.0, timeout_s - (time.monotonic_ns() - result.sent_ns) / 1e9))
        result.end_ns = time.monotonic_ns()
        result.messages = stream.messages
        if not ended:
            connection.cancel(stream)
            result.outcome, result.error = stamps.TIMEOUT, f"no end after {timeout_s:g} s"
        elif stream.error:
            result.outcome, result.error = stamps.UNREACHABLE, stream.error
        elif stream.headers.get("grpc-status", "0") != "0":
            text = unquote(stream.headers.get("grpc-message", "")) or f"gRPC status {stream.headers['grpc-status']}"
            result.outcome, result.error = stamps.outcome_of(text), text
        return result

    def decode(self, exchange: Exchange) -> Decoded:
        return grpc_messages.decode(exchange.messages, self._dialect)

    def close(self) -> None:
        for connection in self._pool:
            if connection is not None:
                connection.close()

    def _next_connection(self) -> Http2Connection:
        """Round robin; a lost connection is replaced. Raises OSError when the server cannot be reached."""
        self._turn = (self._turn + 1) % len(self._pool)
        turn = self._turn
        connection = self._pool[turn]
        if connection is not None and connection.usable:
            return connection
        with self._connecting:  # connecting yields to other greenlets: look again
            connection = self._pool[turn]
            if connection is None or not connection.usable:
                connection = self._pool[turn] = Http2Connection(self._host, self._port)
        return connection
