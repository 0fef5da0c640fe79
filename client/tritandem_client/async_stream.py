"""One answer being received by an asyncio task: the twin of stream.py, same names, same rules.

Owns the life of a request on this side: send, read, retry, end exactly once. Knows nothing about gRPC,
HTTP or tensors. Runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import TYPE_CHECKING

from tritandem_client.answer import Answer
from tritandem_client.errors import TransportError, TritandemClientError
from tritandem_client.request import WireRequest
from tritandem_client.results import Chunk, Result
from tritandem_client.retry import TimeBudget, delay_before_retry_s
from tritandem_client.transports import AsyncCall

if TYPE_CHECKING:
    from typing_extensions import Self

    from tritandem_client.async_client import AsyncClient


class AsyncStream:
    """Iterates over the chunks; cancels the request when closed, left, dropped early or its task is cancelled."""

    def __init__(self, client: AsyncClient, request: WireRequest, timeout_s: float | None) -> None:
        self._client, self._request = client, request
        self._budget = TimeBudget(timeout_s)
        self._answer = Answer(request.request_id)
        self._attempt = 0
        self._call: AsyncCall | None = self._open()

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def text(self) -> str:
        """What has been received so far."""
        return self._answer.text

    @property
    def result(self) -> Result:
        """The whole answer, or what there was when closed early. RuntimeError before the end and after an error."""
        return self._answer.final()

    async def drain(self) -> Result:
        """Read to the end."""
        async for _ in self:
            pass
        return self.result

    async def close(self) -> None:
        """Cancel the request unless it has ended; afterwards iteration stops and `result` holds what had arrived."""
        self._abandon()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._answer.ended:
            try:
                if self._call is None:
                    self._call = self._open()
                chunk = self._answer.add(await anext(self._call))
            except StopAsyncIteration:
                self._answer.complete()
            except TritandemClientError as error:
                await self._retry_or_raise(error)
            except BaseException:
                self._abandon()
                raise
            else:
                if chunk is not None:
                    return chunk
        raise StopAsyncIteration

    def _open(self) -> AsyncCall:
        return self._client.open_call(self._request, self._budget.left_s())

    async def _retry_or_raise(self, error: TritandemClientError) -> None:
        if self._answer.ended:  # closed by another task: this is only the echo
            return
        if not self._answer.started:
            delay_s = delay_before_retry_s(error, self._attempt, self._client.retries, self._budget.left_s())
            if delay_s is not None:
                self._attempt += 1
                self._call = None
                await asyncio.sleep(delay_s)
                return
        self._answer.fail(error)
        if isinstance(error, TransportError):
            self._break_off()
        raise error

    def _abandon(self) -> None:
        if not self._answer.ended:
            self._answer.cancel()
            self._break_off()

    def _break_off(self) -> None:
        if self._call is not None:
            self._call.cancel()
            if self._client.stop_on_close:
                self._client.stop_in_background(self.request_id)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._abandon()

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            with contextlib.suppress(Exception):  # the loop may be closed
                self._abandon()
