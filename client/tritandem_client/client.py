"""The client for threads.

Owns the transport and the stops that run in the background. Knows nothing about gRPC, HTTP or tensors.
A Client may be shared by any number of threads.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from tritandem_client.core import STOP_TIMEOUT_S, ClientCore
from tritandem_client.errors import ConnectionFailed, ServerNotReady, TritandemClientError
from tritandem_client.request import Message, Options, TokenIds, WireRequest
from tritandem_client.results import Health, Result
from tritandem_client.stream import Stream
from tritandem_client.transports import Call, Transport, connect

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class Client(ClientCore):
    """Answers from one model of one Triton server; the arguments are documented in ClientCore.

        with Client("127.0.0.1:8001") as client:
            print(client.generate("The capital of France is", max_tokens=8).text)

    Every call takes the keywords of `Options` and raises the errors of `tritandem_client.errors`.
    """

    def _connect(self) -> None:
        self._transport: Transport = connect(self.address)
        self._closed = False
        self._stopping: set[threading.Thread] = set()

    def generate(
        self, prompt: str | None = None, *, input_ids: TokenIds | None = None, **options: Unpack[Options]
    ) -> Result:
        """The whole answer to a prompt, or to token ids."""
        request = self._build(options, prompt=prompt, input_ids=input_ids, stream=False)
        return Stream(self, request, self._timeout_s(options)).drain()

    def stream(
        self, prompt: str | None = None, *, input_ids: TokenIds | None = None, **options: Unpack[Options]
    ) -> Stream:
        """The answer as it is made; closing or dropping the stream cancels the request."""
        request = self._build(options, prompt=prompt, input_ids=input_ids, stream=True)
        return Stream(self, request, self._timeout_s(options))

    def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Result:
        """The next turn of a conversation; the server applies the model's chat template."""
        request = self._build(options, messages=messages, stream=False)
        return Stream(self, request, self._timeout_s(options)).drain()

    def chat_stream(self, messages: Sequence[Message], **options: Unpack[Options]) -> Stream:
        """As `chat`, as it is made."""
        request = self._build(options, messages=messages, stream=True)
        return Stream(self, request, self._timeout_s(options))

    def stop(self, request_id: str, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End a running request early: its own stream gets what there is, outcome STOPPED. Unknown ids are no error."""
        for _ in self.open_call(self._build_stop(request_id), timeout_s):
            pass

    def health(self, *, timeout_s: float = 5.0) -> Health:
        """Never raises for a server that is down or not ready: that is the answer."""
        return self._transport.health(self.model, timeout_s)

    def wait_ready(self, timeout_s: float = 60.0) -> Health:
        """Ask until the server and the model are ready. Raises ServerNotReady with the last reason."""
        end_s = time.monotonic() + timeout_s
        while not (health := self.health()):
            if time.monotonic() >= end_s:
                raise ServerNotReady(f"not ready within {timeout_s} s: {health.reason}")
            time.sleep(0.1)
        return health

    def close(self) -> None:
        """Let background stops finish, then close the connection; open streams end with an error."""
        for thread in tuple(self._stopping):
            thread.join(STOP_TIMEOUT_S)
        self._closed = True
        self._transport.close()

    def open_call(self, request: WireRequest, timeout_s: float | None) -> Call:
        """For streams: send, and get the responses. Raises ConnectionFailed once the client is closed."""
        if self._closed:
            raise ConnectionFailed("the client is closed")
        return self._transport.open(request, timeout_s)

    def stop_in_background(self, request_id: str) -> None:
        """For a stream that was broken off: nothing waits, nothing is raised."""

        def run() -> None:
            with contextlib.suppress(TritandemClientError, ValueError, RuntimeError):  # the client may be closed
                self.stop(request_id)
            self._stopping.discard(thread)

        thread = threading.Thread(target=run, name=f"stop-{request_id}", daemon=True)
        self._stopping.add(thread)
        thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
