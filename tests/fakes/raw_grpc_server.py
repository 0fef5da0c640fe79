"""A gRPC server of plain asyncio: several times cheaper per message than grpcio's, so that it keeps its times at
hundreds of streams. For this project's `h2` transport only: it ignores the client's flow-control windows.

Anything that a client of single-message streams need not send ends the connection.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Callable

from hpack import Decoder, Encoder
from hyperframe.frame import (
    DataFrame,
    Frame,
    HeadersFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER_BYTES = 9
Handler = Callable[[bytes, int], AsyncIterator[bytes]]


class FrameReader:
    """Cuts what a client sends into frames, behind the preface of the connection."""

    def __init__(self) -> None:
        self.buffer = b""
        self.greeted = False

    def take(self, data: bytes) -> list[Frame]:
        self.buffer += data
        if not self.greeted:
            if len(self.buffer) < len(PREFACE):
                return []
            assert self.buffer.startswith(PREFACE)
            self.buffer, self.greeted = self.buffer[len(PREFACE) :], True
        frames = []
        while len(self.buffer) >= FRAME_HEADER_BYTES:
            frame, size = Frame.parse_frame_header(memoryview(self.buffer[:FRAME_HEADER_BYTES]))
            end = FRAME_HEADER_BYTES + size
            if len(self.buffer) < end:
                break
            frame.parse_body(memoryview(self.buffer[FRAME_HEADER_BYTES:end]))
            self.buffer = self.buffer[end:]
            frames.append(frame)
        return frames


def headers_frame(encoder: Encoder, stream_id: int, name: str, value: str, *, end: bool = False) -> HeadersFrame:
    flags = ["END_HEADERS", "END_STREAM"] if end else ["END_HEADERS"]
    return HeadersFrame(stream_id, encoder.encode([(name, value)]), flags=flags)


def message_frame(stream_id: int, message: bytes) -> DataFrame:
    return DataFrame(stream_id, b"\0" + struct.pack(">I", len(message)) + message)


class RawGrpcConnection(asyncio.Protocol):
    """One client. `handler(request, received_ns)` yields the serialized responses of one stream."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.reader = FrameReader()
        self.bodies: dict[int, bytes] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.decoder, self.encoder = Decoder(), Encoder()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.send(SettingsFrame())

    def connection_lost(self, exc: Exception | None) -> None:
        for task in self.tasks.values():
            task.cancel()

    def send(self, *frames: Frame) -> None:
        self.transport.write(b"".join(frame.serialize() for frame in frames))

    def data_received(self, data: bytes) -> None:
        for frame in self.reader.take(data):
            self.take(frame)

    def take(self, frame: Frame) -> None:
        stream_id = frame.stream_id
        if isinstance(frame, HeadersFrame):
            headers = dict(self.decoder.decode(frame.data))
            assert headers[":method"] == "POST"
            assert headers["content-type"] == "application/grpc"
            self.bodies[stream_id] = b""
        elif isinstance(frame, DataFrame):
            self.bodies[stream_id] += frame.data
            size = len(frame.data)
            self.send(*(WindowUpdateFrame(i, window_increment=size) for i in (0, stream_id)))
            if "END_STREAM" in frame.flags:
                body = self.bodies.pop(stream_id)
                assert int.from_bytes(body[1:5], "big") == len(body) - 5
                answer = self.answer(stream_id, body[5:], time.monotonic_ns())
                self.tasks[stream_id] = asyncio.get_running_loop().create_task(answer)
        elif isinstance(frame, RstStreamFrame):
            task = self.tasks.pop(stream_id, None)
            if task is not None:
                task.cancel()
        elif isinstance(frame, SettingsFrame):
            if "ACK" not in frame.flags:
                self.send(SettingsFrame(flags=["ACK"]))
        else:
            assert isinstance(frame, WindowUpdateFrame), f"unexpected {frame}"

    async def answer(self, stream_id: int, request: bytes, received_ns: int) -> None:
        self.send(headers_frame(self.encoder, stream_id, ":status", "200"))
        async for message in self.handler(request, received_ns):
            self.send(message_frame(stream_id, message))
        self.send(headers_frame(self.encoder, stream_id, "grpc-status", "0", end=True))
        del self.tasks[stream_id]
