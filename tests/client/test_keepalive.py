"""A server that vanishes without a word, as behind a cable that is pulled, is noticed by pings."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from tritandem_client import Client, ConnectionFailed

from tests.client.scripts import chunk, hanging
from tests.fakes.triton_grpc import FakeTritonGrpc


class Cable:
    """Carries bytes to and from `port` until it is cut: then nothing arrives any more, and no connection closes."""

    def __init__(self, port: int) -> None:
        self.cut = threading.Event()
        self._server_port = port
        self._sockets = [socket.create_server(("127.0.0.1", 0))]
        self.url = f"127.0.0.1:{self._sockets[0].getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ends = self._sockets[0].accept()[0], socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += ends
                for here, there in (ends, ends[::-1]):
                    threading.Thread(target=self._carry, args=(here, there), daemon=True).start()

    def _carry(self, here: socket.socket, there: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := here.recv(65536):
                if not self.cut.is_set():
                    there.sendall(data)

    def close(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


@pytest.fixture
def server() -> Iterator[FakeTritonGrpc]:
    with FakeTritonGrpc(hanging(chunk("a"))) as one:
        yield one


@pytest.fixture
def cable(server: FakeTritonGrpc) -> Iterator[Cable]:
    with contextlib.closing(Cable(int(server.url.rpartition(":")[2]))) as one:
        yield one


def test_a_server_that_vanished_is_noticed_long_before_the_time_limit(cable: Cable) -> None:
    with Client(cable.url, timeout_s=60.0, keepalive_s=0.5) as client, client.stream("x") as stream:
        next(stream)
        cable.cut.set()
        begun_s = time.monotonic()
        with pytest.raises(ConnectionFailed) as caught:
            next(stream)
        assert time.monotonic() - begun_s < 30.0
        assert caught.value.partial_text == "a"
