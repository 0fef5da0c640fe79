"""What can go wrong, as exceptions, and how the server's words become them.

Owns the error tree and the reading of error texts. Knows nothing about gRPC, HTTP or tensors. Stateless.

    TritandemClientError
    ├── RequestError          the server (or a check before sending) ended this request
    │   ├── InvalidRequest    REJECTED_INVALID     a field is wrong: `.field`, `.given`, `.allowed`
    │   ├── Saturated         REJECTED_SATURATED   no room now: `.retry_after_s`
    │   ├── DeadlineExpired   EXPIRED              the request's `deadline_ms` passed
    │   ├── Cancelled         CANCELLED            the stream was cancelled
    │   ├── Stopped           STOPPED              a `stop` named this request's id
    │   └── Failed            FAILED               the request, or the engine under it, broke
    └── TransportError        the server's word on this request never came
        ├── ConnectionFailed  refused, reset, or died in mid-stream
        ├── ServerNotReady    reached, but the server or the model does not take requests yet
        └── Timeout           `timeout_s` passed on this side
"""

from __future__ import annotations

import re
from typing import Any, ClassVar


class TritandemClientError(Exception):
    """Base of everything this package raises. `request_id` and `partial_text` are filled in where they are known."""

    request_id: str = ""
    partial_text: str = ""  # what had been received of the answer


class RequestError(TritandemClientError):
    """The request ended without a complete answer; `outcome` is the server's own word for it."""

    outcome: ClassVar[str] = "FAILED"


class InvalidRequest(RequestError):
    outcome = "REJECTED_INVALID"

    def __init__(self, field: str, given: object = None, allowed: str = "", message: str | None = None) -> None:
        self.field, self.given, self.allowed = field, given, allowed
        super().__init__(message or f"{field}: given {_shorten(given)}, allowed: {allowed}")

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, which would call `__init__` with the message as the field."""
        return type(self), (self.field, self.given, self.allowed, str(self)), self.__dict__


class Saturated(RequestError):
    outcome = "REJECTED_SATURATED"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class DeadlineExpired(RequestError):
    outcome = "EXPIRED"


class Cancelled(RequestError):
    outcome = "CANCELLED"


class Stopped(RequestError):
    outcome = "STOPPED"


class Failed(RequestError):
    outcome = "FAILED"


class TransportError(TritandemClientError):
    """Nothing is known about the request's fate on the server."""


class ConnectionFailed(TransportError):
    pass


class ServerNotReady(TransportError):
    pass


class Timeout(TransportError):
    pass


_PLAIN: dict[str, type[RequestError]] = {e.outcome: e for e in (DeadlineExpired, Cancelled, Stopped, Failed)}
_OUTCOME = re.compile(r"\b(REJECTED_INVALID|REJECTED_SATURATED|EXPIRED|CANCELLED|STOPPED|FAILED): (.*)", re.DOTALL)
_FIELD = re.compile(r"(\w+): given (.*), allowed: (.*)", re.DOTALL)
_RETRY_AFTER = re.compile(r"retry after ([0-9.]+) s")
_NAMED_INPUT = re.compile(r"input '(\w+)'")
_QUEUE_FULL = "Exceeds maximum queue size"
_NOT_READY = re.compile(r"unknown model|is not found|no available versions|not ready|is stopping|stopped accepting")


def error_from_server(text: str) -> TritandemClientError:
    """The exception that an error text from the server stands for.

    Tritandem's texts carry an outcome word and a colon, at times after a prefix of Triton's own (an
    ensemble step, a backend name). Triton's core speaks plain sentences: those about inputs become
    InvalidRequest, those about missing models ServerNotReady, a full queue Saturated, everything else Failed.
    """
    found = _OUTCOME.search(text)
    if found:
        word, message = found[1], found[2].strip()
        if word == InvalidRequest.outcome:
            return _invalid(message)
        if word == Saturated.outcome:
            hint = _RETRY_AFTER.search(message)
            return Saturated(message, float(hint[1]) if hint else 1.0)
        return _PLAIN[word](message)
    if _QUEUE_FULL in text:
        return Saturated(text)
    if _NOT_READY.search(text):
        return ServerNotReady(text)
    named = _NAMED_INPUT.search(text)
    if named:
        return InvalidRequest(named[1], message=text)
    return Failed(text)


def _invalid(message: str) -> InvalidRequest:
    parts = _FIELD.match(message)
    if parts:
        return InvalidRequest(parts[1], parts[2], parts[3], message=message)
    return InvalidRequest(message.split(":", 1)[0], message=message)


def _shorten(value: object, limit: int = 80) -> str:
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}... ({len(text)} characters)"
