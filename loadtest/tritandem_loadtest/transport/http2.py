"""One HTTP/2 connection (RFC 9113) for gRPC streams whose request is a single message. Paranoid about changes.

A reader greenlet stamps each socket read once and appends messages to their streams: no thread, no callback and no
greenlet switch per token, which is why one process keeps up with tens of thousands of tokens a second. Owns frames
and flow control. Knows nothing about protobuf or Triton. Everything runs in the greenlets of one thread.
"""

from __future__ import annotations

import struct
import time

import gevent
from gevent import socket
from gevent.event import Event

from . import hpack

_DATA, _HEADERS, _RST, _SETTINGS, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
_END_STREAM, _ACK, _END_HEADERS, _PADDED, _PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
_MAX_STREAMS_ID, _INITIAL_WINDOW_ID, _MAX_FRAME_ID = 3, 4, 5
_CANCEL = 8
_WINDOW_BYTES = 2**31 - 1
_REGRANT_BYTES = 2**28
_READ_BYTES = 1 << 18
_MAX_STREAM_ID = 2**31 - 3


class ConnectionLost(Exception):
    """The connection cannot carry (more) streams; the text says why."""


class Http2Stream:
    """One request on its way. `messages`: (monotonic ns of the read, payload without gRPC's five-byte prefix)."""

    __slots__ = ("done", "error", "headers", "messages", "partial", "send_window", "stream_id", "writable")

    def __init__(self, stream_id: int, send_window: int) -> None:
        self.stream_id = stream_id
        self.send_window = send_window
        self.messages: list[tuple[int, bytes]] = []
        self.partial = b""
        self.headers: dict[str, str] = {}
        self.error = ""  # "": ended by the server's trailers
        self.done = Event()
        self.writable = Event()

    def take(self, data: bytes, now_ns: int) -> None:
        """Split DATA bytes into gRPC messages; a message may span frames and a frame may hold several."""
        if self.partial:
            data = self.partial + data
        at, end = 0, len(data)
        while end - at >= 5:
            size = int.from_bytes(data[at + 1 : at + 5], "big")
            if end - at - 5 < size:
                break
            self.messages.append((now_ns, data[at + 5 : at + 5 + size]))
            at += 5 + size
        self.partial = data[at:] if at else data

    def end(self, error: str = "") -> None:
        if not self.done.is_set():
            self.error = error
            self.done.set()
            self.writable.set()


class Http2Connection:
    """Connects at once. Raises OSError when there is nobody to talk to."""

    def __init__(self, host: str, port: int, connect_timeout_s: float = 10.0) -> None:
        self._socket = socket.create_connection((host, port), timeout=connect_timeout_s)
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._authority = f"{host}:{port}"
        self._streams: dict[int, Http2Stream] = {}
        self._next_id = 1
        self._hpack = hpack.Decoder()
        self._send_window = 65535
        self._peer_stream_window = 65535
        self._peer_max_frame = 16384
        self._peer_max_streams = 2**31
        self._unacknowledged = 0
        self._header_block = b""
        self._header_ends_stream = False
        self._outgoing: list[bytes] = []
        self._writing = False
        self._closed = ""  # why no new stream is possible
        settings = struct.pack(">HIHIHI", 2, 0, _INITIAL_WINDOW_ID, _WINDOW_BYTES, _MAX_FRAME_ID, 1 << 20)
        self._write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, settings))
        self._write(_frame(_WINDOW, 0, 0, struct.pack(">I", _WINDOW_BYTES - 65535)))
        self._reader = gevent.spawn(self._read_loop)

    @property
    def usable(self) -> bool:
        """False when a new stream needs another connection."""
        return not self._closed and self._next_id < _MAX_STREAM_ID and len(self._streams) < self._peer_max_streams

    def start(self, path: str, body: bytes, timeout_s: float) -> Http2Stream:
        """Send a POST of one gRPC message and half-close. Blocks only while the peer's windows are full.

        Raises ConnectionLost when this connection takes no more streams.
        """
        if not self.usable:
            raise ConnectionLost(self._closed or "no more streams on this connection")
        stream = Http2Stream(self._next_id, self._peer_stream_window)
        self._next_id += 2
        self._streams[stream.stream_id] = stream
        block = hpack.encode(
            [
                (":method", "POST"),
                (":scheme", "http"),
                (":path", path),
                (":authority", self._authority),
                ("te", "trailers"),
                ("content-type", "application/grpc"),
                ("grpc-timeout", f"{max(1, int(timeout_s * 1000))}m"),
            ]
        )
        head = _frame(_HEADERS, _END_HEADERS, stream.stream_id, block)
        data = b"\0" + struct.pack(">I", len(body)) + body
        at = 0
        while at < len(data) and not stream.done.is_set():
            room = min(self._send_window, stream.send_window, self._peer_max_frame, len(data) - at)
            if room <= 0:
                self._write(head)
                head = b""
                stream.writable.clear()
                if not stream.writable.wait(timeout_s):
                    self.cancel(stream)
                continue
            last = _END_STREAM if at + room == len(data) else 0
            self._send_window -= room
            stream.send_window -= room
            # Headers and a short message leave in one segment.
            self._write(head + _frame(_DATA, last, stream.stream_id, data[at : at + room]))
            head = b""
            at += room
        return stream

    def cancel(self, stream: Http2Stream) -> None:
        """Tell the server that nobody waits for this stream any more."""
        if self._streams.pop(stream.stream_id, None) is not None and not self._closed:
            self._write(_frame(_RST, 0, stream.stream_id, struct.pack(">I", _CANCEL)))
        stream.end("cancelled")

    def close(self) -> None:
        self._lose("closed")
        self._reader.kill()

    def _lose(self, why: str) -> None:
        self._closed = self._closed or why
        for stream in list(self._streams.values()):
            stream.end(why)
        self._streams.clear()
        self._socket.close()

    # -- writing ---------------------------------------------------------------------------------------------------

    def _write(self, frames: bytes) -> None:
        """Send now, or leave it to the greenlet that is sending: frames of two greenlets never interleave."""
        self._outgoing.append(frames)
        if self._writing:
            return
        self._writing = True
        try:
            while self._outgoing:
                waiting, self._outgoing = self._outgoing, []
                self._socket.sendall(b"".join(waiting))
        except OSError as error:
            self._lose(f"write failed: {error}")
        finally:
            self._writing = False

    # -- reading -------------------------------------------------------------------------------------------------

    def _read_loop(self) -> None:
        rest = b""
        try:
            while True:
                data = self._socket.recv(_READ_BYTES)
                now_ns = time.monotonic_ns()
                if not data:
                    self._lose("the server closed the connection")
                    return
                rest = self._take_frames(rest + data if rest else data, now_ns)
        except (OSError, hpack.HuffmanRefused, IndexError, struct.error) as error:
            self._lose(f"{type(error).__name__}: {error}")

    def _take_frames(self, data: bytes, now_ns: int) -> bytes:
        """Handle every whole frame of `data`; returns the rest."""
        at, end = 0, len(data)
        while end - at >= 9:
            size = int.from_bytes(data[at : at + 3], "big")
            if end - at - 9 < size:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream_id = int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFFFFFF
            payload = data[at + 9 : at + 9 + size]
            at += 9 + size
            if kind == _DATA:
                self._on_data(flags, stream_id, payload, now_ns)
            else:
                self._on_other(kind, flags, stream_id, payload)
        return data[at:]

    def _on_data(self, flags: int, stream_id: int, payload: bytes, now_ns: int) -> None:
        self._unacknowledged += len(payload)
        if self._unacknowledged > _REGRANT_BYTES:
            self._write(_frame(_WINDOW, 0, 0, struct.pack(">I", self._unacknowledged)))
            self._unacknowledged = 0
        stream = self._streams.get(stream_id)
        if stream is None:
            return  # cancelled by us
        stream.take(_unpadded(flags, payload), now_ns)
        if flags & _END_STREAM:
            self._finish(stream_id)

    def _on_other(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind in (_HEADERS, _CONTINUATION):
            self._on_headers(kind, flags, stream_id, payload)
        elif kind == _WINDOW:
            self._on_window(stream_id, int.from_bytes(payload, "big") & 0x7FFFFFFF)
        elif kind == _PING and not flags & _ACK:
            self._write(_frame(_PING, _ACK, 0, payload))
        elif kind == _SETTINGS and not flags & _ACK:
            self._on_settings(payload)
        elif kind == _RST:
            self._finish(stream_id, f"the server reset the stream (code {int.from_bytes(payload, 'big')})")
        elif kind == _GOAWAY:
            last_id, code = struct.unpack(">II", payload[:8])
            self._closed = f"the server is going away (code {code})"
            for unseen in [i for i in self._streams if i > last_id]:
                self._finish(unseen, self._closed)

    def _on_headers(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        if kind == _HEADERS:
            payload = _unpadded(flags, payload)
            self._header_block = payload[5:] if flags & _PRIORITY else payload
            self._header_ends_stream = bool(flags & _END_STREAM)
        else:
            self._header_block += payload
        if not flags & _END_HEADERS:
            return
        headers = self._hpack.decode(self._header_block)
        stream = self._streams.get(stream_id)
        if stream is not None:
            stream.headers.update(headers)
            if self._header_ends_stream:
                self._finish(stream_id)

    def _on_settings(self, payload: bytes) -> None:
        for key, value in struct.iter_unpack(">HI", payload):
            if key == _INITIAL_WINDOW_ID:
                for stream in self._streams.values():
                    stream.send_window += value - self._peer_stream_window
                    stream.writable.set()
                self._peer_stream_window = value
            elif key == _MAX_FRAME_ID:
                self._peer_max_frame = value
            elif key == _MAX_STREAMS_ID:
                self._peer_max_streams = value
        self._write(_frame(_SETTINGS, _ACK, 0, b""))

    def _on_window(self, stream_id: int, increment: int) -> None:
        if stream_id == 0:
            self._send_window += increment
            for stream in self._streams.values():
                stream.writable.set()
        elif stream_id in self._streams:
            self._streams[stream_id].send_window += increment
            self._streams[stream_id].writable.set()

    def _finish(self, stream_id: int, error: str = "") -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            stream.end(error)


def _frame(kind: int, flags: int, stream_id: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream_id) + payload


def _unpadded(flags: int, payload: bytes) -> bytes:
    return payload[1 : len(payload) - payload[0]] if flags & _PADDED else payload
