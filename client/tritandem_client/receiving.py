"""What receiving an answer has in common for threads and for asyncio.

Owns the life of a request on this side: sent, read, retried, ended exactly once. Knows nothing about gRPC,
HTTP, tensors, or how waiting is done: stream.py and async_stream.py add that.
"""

from __future__ import annotations

import contextlib
from typing import Generic, Protocol, TypeVar

from tritandem_client.answer import Answer
from tritandem_client.errors import TransportError, TritandemClientError
from tritandem_client.request import WireRequest
from tritandem_client.results import Result
from tritandem_client.retry import TimeBudget, delay_before_retry_s


class Cancellable(Protocol):
    def cancel(self) -> None: ...


C = TypeVar("C", bound=Cancellable)
C_co = TypeVar("C_co", bound=Cancellable, covariant=True)


class Sender(Protocol[C_co]):
    """What is used of a client."""

    @property
    def retries(self) -> int: ...

    @property
    def stop_on_close(self) -> bool: ...

    def open_call(self, request: WireRequest, timeout_s: float | None) -> C_co: ...

    def stop_in_background(self, request_id: str) -> None: ...


class Receiving(Generic[C]):
    """One request under way; cancelled when it is dropped early."""

    def __init__(self, client: Sender[C], request: WireRequest, timeout_s: float | None) -> None:
        self._client, self._request = client, request
        self._budget = TimeBudget(timeout_s)
        self._answer = Answer(request.request_id)
        self._attempt = 0
        self._call: C | None = self._open()

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

    def _open(self) -> C:
        return self._client.open_call(self._request, self._budget.left_s())

    def _retry_delay_s(self, error: TritandemClientError) -> float:
        """How long to wait before the loop goes on; raises `error` when the request ends with it."""
        if self._answer.ended:  # closed from elsewhere: this is only the echo
            return 0.0
        if not self._answer.started:
            delay_s = delay_before_retry_s(error, self._attempt, self._client.retries, self._budget.left_s())
            if delay_s is not None:
                self._attempt += 1
                self._call = None
                return delay_s
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

    def __del__(self) -> None:
        if hasattr(self, "_call"):
            with contextlib.suppress(Exception):  # the interpreter may be shutting down, the loop may be closed
                self._abandon()
