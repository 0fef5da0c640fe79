"""How a request ends, and the errors that a client may see. Tier 0; imported through `contracts`.

The class decides the outcome word that clients, metrics and logs see:

    TritandemError
    ├── InvalidRequest      REJECTED_INVALID     a field is wrong: names it, what was given, what is allowed
    ├── Saturated           REJECTED_SATURATED   no room now: says when to try again
    │   └── Draining        REJECTED_SATURATED   the server is shutting down
    ├── DeadlineExpired     EXPIRED              the deadline passed before the answer was complete
    ├── RequestCancelled    CANCELLED            the client closed or cancelled the stream
    ├── RequestStopped      STOPPED              a `stop` request named this request's id
    ├── EngineFailed        FAILED               this request, or the engine under it, broke
    └── ConfigError         (start-up only)      a configuration key or file is wrong
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

from .printable import printable, shown

MAX_NAME_CHARS = 128  # clients make names up


class Outcome(str, Enum):
    """How a request ended. Exactly one per request; at once metric label, log field and public code."""

    COMPLETED = "COMPLETED"  # the model ended it (end token, stop word) or max_tokens was reached
    STOPPED = "STOPPED"  # a `stop` request named its id
    REJECTED_SATURATED = "REJECTED_SATURATED"
    REJECTED_INVALID = "REJECTED_INVALID"
    EXPIRED = "EXPIRED"
    CANCELLED = "CANCELLED"
    FAILED = "FAILED"


class TritandemError(Exception):
    """Base of everything a client may see. `str(error)` is the public message after the outcome word."""

    outcome: ClassVar[Outcome] = Outcome.FAILED

    def public_message(self) -> str:
        """The text of the Triton error response: the outcome word, a colon, what happened."""
        return printable(f"{self.outcome.value}: {self}")


class InvalidRequest(TritandemError):
    """`field_name` got `given`, but only `allowed` is accepted. All three are kept as the message shows them: none is
    longer than that, whatever was given."""

    outcome = Outcome.REJECTED_INVALID

    def __init__(self, field_name: str, given: object, allowed: str) -> None:
        self.field_name, self.given = printable(field_name[:MAX_NAME_CHARS]), shown(given)
        self.allowed = allowed
        super().__init__(f"{self.field_name}: given {self.given}, allowed: {allowed}")


class Saturated(TritandemError):
    """The bounded queue is full. `retry_after_s` is an estimate from the work ahead."""

    outcome = Outcome.REJECTED_SATURATED

    def __init__(self, reason: str, retry_after_s: float) -> None:
        self.reason, self.retry_after_s = reason, retry_after_s
        super().__init__(f"{reason}; retry after {retry_after_s:.1f} s")


class Draining(Saturated):
    """The server is shutting down and takes no new requests."""

    def __init__(self, retry_after_s: float = 5.0) -> None:
        super().__init__("the server is draining", retry_after_s)


class DeadlineExpired(TritandemError):
    outcome = Outcome.EXPIRED


class RequestCancelled(TritandemError):
    outcome = Outcome.CANCELLED


class RequestStopped(TritandemError):
    outcome = Outcome.STOPPED


class EngineFailed(TritandemError):
    outcome = Outcome.FAILED


class ConfigError(TritandemError):
    """A configuration file, key or value is wrong; raised at start-up only."""


def told(error: BaseException) -> str:
    """What a client may read of an exception: of one that is not ours only its kind, as its text may name the server's
    insides."""
    return str(error) if isinstance(error, TritandemError) else f"internal error ({type(error).__name__})"
