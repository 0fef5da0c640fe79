"""gRPC over `h2` connections: the fast transport. `grpc_io` is its slow twin and must agree with it.

Owns a pool of connections. Runs in the greenlets of one thread; needs no monkey patching.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import unquote, urlsplit

from gevent.lock import BoundedSemaphore

from .. import stamps
from ..dialects import Dialect
from . import grpc_messages
from .h2_connection import ConnectionLost, GrpcConnection, GrpcStream
from .interface import Call, Decoded, Exchange


class H2Transport:
    """`url` is HOST:PORT, optionally with grpc:// or, for TLS, grpcs:// in front. Raises ValueError without a port."""

    def __init__(
        self, url: str, dialect: Dialect, model: str, connections: int, ignore_eos: bool, headers: Mapping[str, str]
    ) -> None:
        parts = urlsplit(url if "://" in url else f"grpc://{url}")
        if not parts.hostname or not parts.port:
            raise ValueError(f"no HOST:PORT in {url!r}")
        self._host, self._port, self._tls = parts.hostname, parts.port, parts.scheme == "grpcs"
        self._dialect, self._model, self._ignore_eos = dialect, model, ignore_eos
        self._headers = [(name.lower(), value) for name, value in headers.items()]
        self._pool: list[GrpcConnection | None] = [None] * connections
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
            stream = connection.start(grpc_messages.STREAM_PATH, body, timeout_s, self._headers)
        except (OSError, ConnectionLost) as error:
            result.end_ns = time.monotonic_ns()
            result.outcome, result.error = stamps.UNREACHABLE, str(error)
            return result
        ended = stream.done.wait(max(0.0, timeout_s - (time.monotonic_ns() - result.sent_ns) / 1e9))
        result.end_ns = stream.ended_ns or time.monotonic_ns()
        result.messages = stream.messages
        if ended:
            result.outcome, result.error = _outcome(stream)
        else:
            connection.cancel(stream)
            result.outcome, result.error = stamps.TIMEOUT, f"no end after {timeout_s:g} s"
        return result

    def decode(self, exchange: Exchange) -> Decoded:
        return grpc_messages.decode(exchange.messages, self._dialect)

    def close(self) -> None:
        for connection in self._pool:
            if connection is not None:
                connection.close()

    def _next_connection(self) -> GrpcConnection:
        """One that takes a stream now. Raises OSError when the server cannot be reached."""
        while True:
            place = self._next_place()
            connection = self._pool[place]
            if connection is not None and connection.alive:
                return connection
            self._connect(place)  # lets other greenlets run, and they may fill it: look again

    def _next_place(self) -> int:
        """Round robin over the connections that are not full; where all are, the pool grows."""
        for _ in self._pool:
            self._turn = (self._turn + 1) % len(self._pool)
            connection = self._pool[self._turn]
            if connection is None or not connection.alive or not connection.full:
                return self._turn
        self._pool.append(None)
        return len(self._pool) - 1

    def _connect(self, place: int) -> None:
        with self._connecting:
            connection = self._pool[place]
            if connection is None or not connection.alive:
                self._pool[place] = GrpcConnection(self._host, self._port, self._tls)


def _outcome(stream: GrpcStream) -> tuple[str, str]:
    """(outcome, text) of a stream that has ended; both empty when the server ended it well."""
    if stream.error:
        return stamps.UNREACHABLE, stream.error
    http, grpc = stream.headers.get(":status", "200"), stream.headers.get("grpc-status", "0")
    if http != "200":
        return stamps.UNREACHABLE, f"HTTP status {http}"
    if grpc == "0":
        return "", ""
    text = unquote(stream.headers.get("grpc-message", "")) or f"gRPC status {grpc}"
    return stamps.outcome_of(text), text
