"""The client for asyncio: the twin of client.py, same names.

Owns the transport and the stops that run in the background. Knows nothing about gRPC, HTTP or tensors.
Belongs to one event loop; any number of its tasks may share it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from tritandem_client.async_stream import AsyncStream
from tritandem_client.core import STOP_TIMEOUT_S, ClientCore
from tritandem_client.errors import ConnectionFailed, ServerNotReady, TritandemClientError
from tritandem_client.request import Message, Options, TokenIds, WireRequest
from tritandem_client.results import Health, Result
from tritandem_client.transports import AsyncCall, AsyncTransport, connect_async

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


class AsyncClient(ClientCore):
    """Answers from one model of one Triton server; the arguments are documented in ClientCore.

        async with AsyncClient("127.0.0.1:8001") as client:
            async for chunk in client.stream("The capital of France is"):
                print(chunk.text, end="")

    Every call takes the keywords of `Options` and raises the errors of `tritandem_client.errors`.
    """

    def _connect(self) -> None:
        self._transport: AsyncTransport = connect_async(self.address)
        self._closed = False
        self._stopping: set[asyncio.Task[None]] = set()

    async def generate(
        self, prompt: str | None = None, *, input_ids: TokenIds | None = None, **options: Unpack[Options]
    ) -> Result:
        """The whole answer to a prompt, or to token ids."""
        request = self._build(options, prompt=prompt, input_ids=input_ids, stream=False)
        return await AsyncStream(self, request, self._timeout_s(options)).drain()

    def stream(
        self, prompt: str | None = None, *, input_ids: TokenIds | None = None, **options: Unpack[Options]
    ) -> AsyncStream:
        """The answer as it is made; closing or dropping the stream, or cancelling its task, cancels the request."""
        request = self._build(options, prompt=prompt, input_ids=input_ids, stream=True)
        return AsyncStream(self, request, self._timeout_s(options))

    async def chat(self, messages: Sequence[Message], **options: Unpack[Options]) -> Result:
        """The next turn of a conversation; the server applies the model's chat template."""
        request = self._build(options, messages=messages, stream=False)
        return await AsyncStream(self, request, self._timeout_s(options)).drain()

    def chat_stream(self, messages: Sequence[Message], **options: Unpack[Options]) -> AsyncStream:
        """As `chat`, as it is made."""
        request = self._build(options, messages=messages, stream=True)
        return AsyncStream(self, request, self._timeout_s(options))

    async def stop(self, request_id: str, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End a running request early: its own stream gets what there is, outcome STOPPED. Unknown ids are no error."""
        async for _ in self.open_call(self._build_stop(request_id), timeout_s):
            pass

    async def health(self, *, timeout_s: float = 5.0) -> Health:
        """Never raises for a server that is down or not ready: that is the answer."""
        return await self._transport.health(self.model, timeout_s)

    async def wait_ready(self, timeout_s: float = 60.0) -> Health:
        """Ask until the server and the model are ready. Raises ServerNotReady with the last reason."""
        end_s = time.monotonic() + timeout_s
        while not (health := await self.health()):
            if time.monotonic() >= end_s:
                raise ServerNotReady(f"not ready within {timeout_s} s: {health.reason}")
            await asyncio.sleep(0.1)
        return health

    async def close(self) -> None:
        """Let background stops finish, then close the connection; open streams end with an error."""
        if self._stopping:
            await asyncio.wait(self._stopping, timeout=STOP_TIMEOUT_S)
        self._closed = True
        await self._transport.close()

    def open_call(self, request: WireRequest, timeout_s: float | None) -> AsyncCall:
        """For streams: send, and get the responses. Raises ConnectionFailed once the client is closed."""
        if self._closed:
            raise ConnectionFailed("the client is closed")
        return self._transport.open(request, timeout_s)

    def stop_in_background(self, request_id: str) -> None:
        """For a stream that was broken off: nothing waits, nothing is raised."""

        async def run() -> None:
            with contextlib.suppress(TritandemClientError):
                await self.stop(request_id)

        task = asyncio.get_running_loop().create_task(run())
        self._stopping.add(task)
        task.add_done_callback(self._stopping.discard)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self.close()
