"""A gRPC server in a thread that plays one script on each connection: for what a well-behaved server does rarely.

The script gets an open `Peer`; the thread that runs it ends with it. A failed script fails the test at `close`.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from hpack import Encoder
from hyperframe.frame import DataFrame, Frame, SettingsFrame

from tests.fakes.raw_grpc_server import FrameReader, headers_frame, message_frame

TIMEOUT_S = 10.0


class Peer:
    """The server's end of one connection; `number` counts connections from 0."""

    def __init__(self, connection: socket.socket, number: int) -> None:
        self.connection, self.number = connection, number
        self.reader, self.encoder = FrameReader(), Encoder()
        self.unread: list[Frame] = []

    def send(self, *frames: Frame) -> None:
        self.connection.sendall(b"".join(frame.serialize() for frame in frames))

    def settle(self, settings: dict[int, int]) -> None:
        self.send(SettingsFrame(settings=settings))

    def wait_for(self, kind: type[Frame], flag: str = "") -> Frame:
        """The next frame of this kind, with this flag if one is named; skips others. Raises EOFError at a hang-up."""
        while True:
            while self.unread:
                frame = self.unread.pop(0)
                if isinstance(frame, kind) and (not flag or flag in frame.flags):
                    return frame
            data = self.connection.recv(65536)
            if not data:
                raise EOFError
            self.unread += self.reader.take(data)

    def wait_for_request(self) -> int:
        """The id of the stream whose request is complete."""
        return self.wait_for(DataFrame, "END_STREAM").stream_id

    def begin(self, stream_id: int) -> None:
        self.send(headers_frame(self.encoder, stream_id, ":status", "200"))

    def answer(self, stream_id: int, message: bytes) -> None:
        self.send(message_frame(stream_id, message))

    def finish(self, stream_id: int) -> None:
        self.send(headers_frame(self.encoder, stream_id, "grpc-status", "0", end=True))


class ScriptedServer:
    """Serves `connections` connections, each by `script(peer)` in a thread of its own, until the client hangs up."""

    def __init__(self, script: Callable[[Peer], None], connections: int) -> None:
        self.script = script
        self.errors: list[BaseException] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(TIMEOUT_S)
        self.url = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.threads = [threading.Thread(target=self.serve, args=(n,)) for n in range(connections)]
        for thread in self.threads:
            thread.start()

    def serve(self, number: int) -> None:
        try:
            connection, _ = self.listener.accept()
            with connection:
                connection.settimeout(TIMEOUT_S)
                self.script(Peer(connection, number))
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(65536):  # closing with unread data would take back what was sent
                    pass
        except BaseException as error:
            self.errors.append(error)

    def __enter__(self) -> ScriptedServer:
        return self

    def __exit__(self, *error: object) -> None:
        for thread in self.threads:
            thread.join(2 * TIMEOUT_S)
        self.listener.close()
        if error[0] is None:
            assert not self.errors, self.errors
