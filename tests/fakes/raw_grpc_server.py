"""A gRPC server of plain asyncio: an order of magnitude cheaper per message than grpcio's, so that it keeps its times
at hundreds of streams. For the project's own wire client only: it ignores the client's flow-control windows.

Anything that a client of single-message streams need not send ends the connection.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable

from tritandem_loadtest.transport import hpack

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, WINDOW = 0, 1, 3, 4, 6, 8
Handler = Callable[[bytes, int], AsyncIterator[bytes]]


def frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream_id) + payload


class RawGrpcConnection(asyncio.Protocol):
    """One client. `handler(request, received_ns)` yields the serialized responses of one stream."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.buffer = b""
        self.greeted = False
        self.bodies: dict[int, bytes] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(frame(SETTINGS, 0, 0, b""))

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self.tasks.values():
            task.cancel()

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        if not self.greeted:
            if len(self.buffer) < len(PREFACE):
                return
            assert self.buffer.startswith(PREFACE)
            self.buffer, self.greeted = self.buffer[len(PREFACE) :], True
        while len(self.buffer) >= 9:
            size = int.from_bytes(self.buffer[:3], "big")
            if len(self.buffer) < 9 + size:
                return
            kind, flags, stream_id = struct.unpack(">BBI", self.buffer[3:9])
            payload, self.buffer = self.buffer[9 : 9 + size], self.buffer[9 + size :]
            self.take(kind, flags, stream_id, payload)

    def take(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == HEADERS:
            headers = hpack.Decoder().decode(payload)  # the client writes literals only
            assert headers[":method"] == "POST"
            assert headers["content-type"] == "application/grpc"
            self.bodies[stream_id] = b""
        elif kind == DATA:
            self.bodies[stream_id] += payload
            update = struct.pack(">I", len(payload))
            self.transport.write(frame(WINDOW, 0, 0, update) + frame(WINDOW, 0, stream_id, update))
            if flags & 1:
                body = self.bodies.pop(stream_id)
                assert int.from_bytes(body[1:5], "big") == len(body) - 5
                answer = self.answer(stream_id, body[5:], time.monotonic_ns())
                self.tasks[stream_id] = asyncio.get_running_loop().create_task(answer)
        elif kind == RST:
            task = self.tasks.pop(stream_id, None)
            if task is not None:
                task.cancel()
        elif kind == SETTINGS:
            if not flags & 1:
                self.transport.write(frame(SETTINGS, 1, 0, b""))
        else:
            assert kind == WINDOW, f"unexpected frame of kind {kind}"

    async def answer(self, stream_id: int, request: bytes, received_ns: int) -> None:
        self.transport.write(frame(HEADERS, 4, stream_id, hpack.encode([(":status", "200")])))
        async for message in self.handler(request, received_ns):
            payload = b"\0" + struct.pack(">I", len(message)) + message
            self.transport.write(frame(DATA, 0, stream_id, payload))
        self.transport.write(frame(HEADERS, 5, stream_id, hpack.encode([("grpc-status", "0")])))
        del self.tasks[stream_id]
