"""gRPC through grpcio inside gevent: the slow twin of `grpc_h2`, by gRPC's own implementation.

Must be created in a monkey-patched process: it switches grpcio to gevent's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

import grpc
import grpc.experimental.gevent

from .. import stamps
from ..dialects import Dialect
from . import grpc_messages
from .interface import Call, Decoded, Exchange

_CONNECT_S = 3.0


class GrpcioTransport:
    """`url` is HOST:PORT; with grpcs:// in front the channel uses TLS and the system's certificates."""

    def __init__(
        self, url: str, dialect: Dialect, model: str, connections: int, ignore_eos: bool, headers: Mapping[str, str]
    ) -> None:
        grpc.experimental.gevent.init_gevent()
        self._dialect, self._model, self._ignore_eos = dialect, model, ignore_eos
        target = url.split("://")[-1].rstrip("/")
        self._channels = []
        for i in range(connections):
            # An option that differs keeps channels from sharing one connection.
            options = [("grpc.max_receive_message_length", -1), ("tritandem.connection", i)]
            if url.startswith("grpcs://"):
                self._channels.append(grpc.secure_channel(target, grpc.ssl_channel_credentials(), options))
            else:
                self._channels.append(grpc.insecure_channel(target, options))
        # A client stream of one message looks like a unary request.
        self._calls = [channel.unary_stream(grpc_messages.STREAM_PATH) for channel in self._channels]
        self._metadata = [(name.lower(), value) for name, value in headers.items()]
        self._turn = 0

    def open(self) -> None:
        with suppress(grpc.FutureTimeoutError):
            for channel in self._channels:
                grpc.channel_ready_future(channel).result(timeout=_CONNECT_S)

    def exchange(self, call: Call, timeout_s: float) -> Exchange:
        body = grpc_messages.encode(call, self._dialect, self._model, self._ignore_eos)
        self._turn = (self._turn + 1) % len(self._calls)
        result = Exchange(sent_ns=time.monotonic_ns())
        try:
            for message in self._calls[self._turn](body, timeout=timeout_s, metadata=self._metadata):
                result.messages.append((time.monotonic_ns(), message))
        except grpc.RpcError as error:
            text = error.details() or str(error.code())
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                result.outcome, text = stamps.TIMEOUT, f"no end after {timeout_s:g} s"
            elif error.code() is grpc.StatusCode.UNAVAILABLE:
                result.outcome = stamps.UNREACHABLE
            else:
                result.outcome = stamps.outcome_of(text)
            result.error = text
        result.end_ns = time.monotonic_ns()
        return result

    def decode(self, exchange: Exchange) -> Decoded:
        return grpc_messages.decode(exchange.messages, self._dialect)

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
