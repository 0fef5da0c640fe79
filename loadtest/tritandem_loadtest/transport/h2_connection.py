"""One HTTP/2 connection for gRPC streams whose request is a single message: the library `h2` driven by a gevent socket.

A reader greenlet stamps each socket read once and appends messages to their streams: no thread, no callback and no
greenlet switch per token. `h2` owns frames, header compression and flow-control arithmetic. Knows nothing about
protobuf or Triton. Everything runs in the greenlets of one thread.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence

import gevent
from gevent import socket, ssl
from gevent.event import Event
from h2.config import H2Configuration
from h2.connection import ConnectionInputs, H2Connection, H2ConnectionStateMachine
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
    WindowUpdated,
)
from h2.events import Event as H2Event
from h2.exceptions import H2Error
from h2.settings import SettingCodes, Settings

_STREAM_WINDOW_BYTES = 2**24
_CONNECTION_WINDOW_BYTES = 2**30
_ACKNOWLEDGE_BYTES = 2**16  # of one stream at a time: far below both windows, far above one message
_READ_BYTES = 1 << 18
_CLIENT_SETTINGS = {
    SettingCodes.ENABLE_PUSH: 0,
    SettingCodes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW_BYTES,
}


class ConnectionLost(Exception):
    """The connection cannot carry (more) streams; the text says why."""


class GrpcStream:
    """One request on its way. `messages`: (monotonic ns of the read, payload without gRPC's five-byte prefix)."""

    __slots__ = (
        "done",
        "ended_ns",
        "error",
        "headers",
        "messages",
        "partial",
        "stream_id",
        "unacknowledged",
        "writable",
    )

    def __init__(self, stream_id: int) -> None:
        self.stream_id = stream_id
        self.messages: list[tuple[int, bytes]] = []
        self.partial = b""
        self.unacknowledged = 0  # bytes that the server may not send again yet
        self.headers: dict[str, str] = {}
        self.error = ""  # "": ended by the server's trailers
        self.done = Event()
        self.ended_ns = 0  # when its end was read: the greenlet that waits for it may wake much later
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
            self.error, self.ended_ns = error, time.monotonic_ns()
            self.done.set()
            self.writable.set()


class _StateMachine(H2ConnectionStateMachine):
    """A server that announces its end still finishes the streams it has; `h2` by itself refuses their frames."""

    def process_input(self, input_: ConnectionInputs) -> list[H2Event]:
        return [] if input_ is ConnectionInputs.RECV_GOAWAY else super().process_input(input_)


class GrpcConnection:
    """Connects at once and waits for the server's settings, so that its limits are known to the first stream.

    `tls` trusts the system's certificates. Raises OSError when nobody that speaks HTTP/2 answers in time.
    """

    def __init__(self, host: str, port: int, tls: bool = False, connect_timeout_s: float = 10.0) -> None:
        self._socket = _dial(host, port, tls, connect_timeout_s)
        self._scheme = "https" if tls else "http"
        self._authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._streams: dict[int, GrpcStream] = {}
        self._outgoing: list[bytes] = []
        self._writing = False
        self._closed = ""  # why no new stream is possible
        self._answered = Event()  # with settings, or by hanging up
        self._h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self._h2.state_machine = _StateMachine()
        self._h2.local_settings = Settings(client=True, initial_values=_CLIENT_SETTINGS)
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_CONNECTION_WINDOW_BYTES - self._h2.inbound_flow_control_window)
        self._write()
        self._reader = gevent.spawn(self._read_loop)
        if not self._answered.wait(connect_timeout_s):
            self.close()
            raise TimeoutError(f"no HTTP/2 settings after {connect_timeout_s:g} s")
        if self._closed:
            raise ConnectionError(self._closed)

    @property
    def alive(self) -> bool:
        """False when it will never take another stream."""
        return not self._closed

    @property
    def full(self) -> bool:
        """True while the server allows no further stream beside those that are open."""
        return bool(self._streams) and len(self._streams) >= self._h2.remote_settings.max_concurrent_streams

    def start(
        self, path: str, body: bytes, timeout_s: float, more_headers: Sequence[tuple[str, str]] = ()
    ) -> GrpcStream:
        """Send a POST of one gRPC message and half-close. Blocks while the server's windows are full; after `timeout_s`
        of that the rest stays unsent, and the stream is the caller's to cancel.

        Raises ConnectionLost when this connection takes no more streams.
        """
        if self._closed:
            raise ConnectionLost(self._closed)
        headers = [
            (":method", "POST"),
            (":scheme", self._scheme),
            (":path", path),
            (":authority", self._authority),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("grpc-timeout", f"{max(1, int(timeout_s * 1000))}m"),
            *more_headers,
        ]
        try:
            stream = GrpcStream(self._h2.get_next_available_stream_id())
            self._h2.send_headers(stream.stream_id, headers)
        except H2Error as error:  # the last stream id is used up, or the server's limit is reached
            raise ConnectionLost(f"{type(error).__name__}: {error}") from error
        self._streams[stream.stream_id] = stream
        self._send_body(stream, b"\0" + struct.pack(">I", len(body)) + body, timeout_s)
        return stream

    def cancel(self, stream: GrpcStream) -> None:
        """Tell the server that nobody waits for this stream any more."""
        if stream.stream_id in self._streams:
            self._h2.reset_stream(stream.stream_id, ErrorCodes.CANCEL)
            self._finish(stream.stream_id, "cancelled")
            self._write()

    def close(self) -> None:
        self._lose("closed")
        self._reader.kill()

    def _lose(self, why: str) -> None:
        self._closed = self._closed or why
        for stream in self._streams.values():
            stream.end(why)
        self._streams.clear()
        self._answered.set()
        self._socket.close()

    # -- writing ---------------------------------------------------------------------------------------------------

    def _send_body(self, stream: GrpcStream, data: bytes, timeout_s: float) -> None:
        at, deadline_s = 0, time.monotonic() + timeout_s
        while not stream.done.is_set():
            room = min(self._h2.local_flow_control_window(stream.stream_id), self._h2.max_outbound_frame_size)
            if room > 0:
                part = data[at : at + room]
                at += len(part)
                self._h2.send_data(stream.stream_id, part, end_stream=at == len(data))
                if at == len(data):
                    break
                continue
            stream.writable.clear()
            self._write()
            if not stream.writable.wait(max(0.0, deadline_s - time.monotonic())):
                return
        self._write()  # headers and a short message leave in one segment

    def _write(self) -> None:
        """Send what `h2` has, or leave it to the greenlet that is sending: frames never interleave."""
        self._outgoing.append(self._h2.data_to_send())  # at once, for a GOAWAY discards what is still in there
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

    # -- reading ---------------------------------------------------------------------------------------------------

    def _read_loop(self) -> None:
        try:
            while data := self._socket.recv(_READ_BYTES):
                now_ns = time.monotonic_ns()
                for event in self._h2.receive_data(data):
                    if type(event) is DataReceived:
                        self._on_data(event, now_ns)
                    else:
                        self._on_other(event)
                reply = self._h2.data_to_send()
                if reply:
                    self._outgoing.append(reply)
                    gevent.spawn(self._write)  # the reader itself never waits for the server to read
                if self._closed and not self._streams:
                    break  # the last stream of a server that said goodbye
            self._lose("the server closed the connection")
        except (OSError, H2Error, UnicodeDecodeError) as error:
            self._lose(f"{type(error).__name__}: {error}")

    def _on_data(self, event: DataReceived, now_ns: int) -> None:
        stream = self._streams.get(event.stream_id)
        if stream is None:  # given up when the server announced its end
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            return
        stream.take(event.data, now_ns)
        stream.unacknowledged += event.flow_controlled_length
        if stream.unacknowledged >= _ACKNOWLEDGE_BYTES:
            self._acknowledge(stream)

    def _on_other(self, event: H2Event) -> None:
        if isinstance(event, (ResponseReceived, TrailersReceived)):
            stream = self._streams.get(event.stream_id)
            if stream is not None:
                stream.headers.update(event.headers)  # type: ignore[arg-type]  # header_encoding: they are text
        elif isinstance(event, StreamEnded):
            self._finish(event.stream_id)
        elif isinstance(event, StreamReset):
            self._finish(event.stream_id, f"the server reset the stream (code {int(event.error_code)})")
        elif isinstance(event, WindowUpdated) and event.stream_id in self._streams:
            self._streams[event.stream_id].writable.set()
        elif isinstance(event, (WindowUpdated, RemoteSettingsChanged)):
            self._answered.set()
            for stream in self._streams.values():
                stream.writable.set()
        elif isinstance(event, ConnectionTerminated):
            self._closed = f"the server is going away (code {int(event.error_code or 0)})"
            for unseen in [i for i in self._streams if i > (event.last_stream_id or 0)]:
                self._finish(unseen, self._closed)

    def _acknowledge(self, stream: GrpcStream) -> None:
        self._h2.acknowledge_received_data(stream.unacknowledged, stream.stream_id)
        stream.unacknowledged = 0

    def _finish(self, stream_id: int, error: str = "") -> None:
        stream = self._streams.pop(stream_id, None)
        if stream is not None:
            self._acknowledge(stream)  # the connection's window outlives the stream
            stream.end(error)


def _dial(host: str, port: int, tls: bool, timeout_s: float) -> socket.socket:
    connected = socket.create_connection((host, port), timeout=timeout_s)
    try:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.load_default_certs()
            context.set_alpn_protocols(["h2"])
            connected = context.wrap_socket(connected, server_hostname=host)
        connected.settimeout(None)
    except OSError:
        connected.close()
        raise
    return connected
