"""What an API client sees of an error: a status, an `error` object, headers. Pure.

The outcome words are those of the scheduler; each has one status. Knows nothing about HTTP's framing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

from tritandem_client import (
    Cancelled,
    ConnectionFailed,
    DeadlineExpired,
    InvalidRequest,
    Saturated,
    ServerNotReady,
    Stopped,
    Timeout,
    TritandemClientError,
)

from ..contracts.errors import InvalidRequest as InvalidHere
from ..contracts.errors import Outcome
from ..contracts.printable import printable

CLIENT_GONE = 499
DRAINING = "the server is draining"
# What Triton's inputs are called at this door.
_NAMES = {
    "text_input": "prompt",
    "input_ids": "prompt",
    "stop_words": "stop",
    "deadline_ms": "x-deadline-ms",
    "priority": "x-priority",
    "tenant": "user",
}


class ApiError(Exception):
    """Ends one request. `code` is for programs: OpenAI's word where there is one, else the outcome's in lower case."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        *,
        param: str | None = None,
        code: str | None = None,
        outcome: Outcome = Outcome.REJECTED_INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.outcome = status, kind, param, outcome
        self.code = code or outcome.value.lower()
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        said = {"message": printable(str(self)), "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": said}).encode()

    def rename(self, name: Callable[[str], str]) -> None:
        """The field is called otherwise where it came in."""
        if self.param is not None and (new := name(self.param)) != self.param:
            self.args = (str(self).replace(f"{self.param}: ", f"{new}: ", 1),)
            self.param = new


class ClientGone(ApiError):
    """Nobody is left to tell; the log hears of it."""

    def __init__(self) -> None:
        super().__init__(CLIENT_GONE, "the client has gone", outcome=Outcome.CANCELLED)


def invalid(param: str, given: object, allowed: str, code: str = "invalid_value") -> ApiError:
    """A field is wrong: the message names it, what was given and what is allowed."""
    return ApiError(400, str(InvalidHere(param, given, allowed)), param=printable(param), code=code)


def not_honoured(param: str, given: object, allowed: str) -> ApiError:
    """A field that would change the answer, and that this server cannot follow."""
    return invalid(param, given, allowed, "unsupported_value")


def saturated(message: str, retry_after_s: float) -> ApiError:
    return ApiError(
        429,
        message,
        "rate_limit_error",
        code="rate_limit_exceeded",
        outcome=Outcome.REJECTED_SATURATED,
        headers=_retry(retry_after_s),
    )


def draining(retry_after_s: float = 5.0) -> ApiError:
    return ApiError(
        503,
        DRAINING,
        "server_error",
        code="draining",
        outcome=Outcome.REJECTED_SATURATED,
        headers=_retry(retry_after_s),
    )


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, "server_error", code="unavailable", outcome=Outcome.FAILED, headers=_retry(1.0))


def from_client(error: TritandemClientError, names: Mapping[str, str]) -> ApiError:
    """What the server said, in this API's terms. `names`: which of two names of a field this request used."""
    if isinstance(error, InvalidRequest):
        param = _renamed(error.field, {**_NAMES, **names})
        too_long = "(context " in str(error)
        message = str(error).replace(f"{error.field}: ", f"{param}: ", 1)
        return ApiError(400, message, param=param, code="context_length_exceeded" if too_long else "invalid_value")
    if isinstance(error, Saturated):
        return draining() if DRAINING in str(error) else saturated(str(error), error.retry_after_s)
    if isinstance(error, DeadlineExpired):
        return ApiError(504, str(error), "server_error", outcome=Outcome.EXPIRED)
    if isinstance(error, Timeout):
        return ApiError(504, str(error), "server_error", outcome=Outcome.FAILED)
    if isinstance(error, (Cancelled, Stopped)):
        outcome = Outcome.STOPPED if isinstance(error, Stopped) else Outcome.CANCELLED
        return ApiError(CLIENT_GONE, str(error), "server_error", outcome=outcome)
    if isinstance(error, (ConnectionFailed, ServerNotReady)):
        return unavailable("the model is not ready, or its server is being restarted")
    return ApiError(500, str(error), "server_error", outcome=Outcome.FAILED)


def _renamed(field: str, names: Mapping[str, str]) -> str:
    """Or what stands above it; a path inside tools that are called is not one that the client wrote."""
    for name, new in names.items():
        if field == name:
            return new
        if field.startswith((f"{name}.", f"{name}[")):
            return new if new == "tools" else new + field[len(name) :]
    return field


def _retry(seconds: float) -> dict[str, str]:
    return {"retry-after": str(max(1, math.ceil(seconds)))}
