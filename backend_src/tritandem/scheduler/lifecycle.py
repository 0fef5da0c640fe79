"""The life of a request, and the one place that decides that it ends exactly once.

    WAITING ──> DISPATCHED ──> ANSWERING ──> ENDED      (every state may go to ENDED, nothing leaves it)
       ^────────────┘ its engine failed or was full, and the client has seen nothing yet

Knows nothing about engines, threads or text. Callers hold the delivery desk's lock around every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..contracts.errors import EngineFailed, Outcome, RequestCancelled, TritandemError
from ..contracts.stream import FinishCode, FinishReason


class State(Enum):
    WAITING = "waiting"  # in the queue
    DISPATCHED = "dispatched"  # handed to an engine; the client has seen nothing: may still move
    ANSWERING = "answering"  # a response has gone out
    ENDED = "ended"


ALLOWED: dict[State, frozenset[State]] = {
    State.WAITING: frozenset({State.DISPATCHED, State.ENDED}),
    State.DISPATCHED: frozenset({State.WAITING, State.ANSWERING, State.ENDED}),
    State.ANSWERING: frozenset({State.ENDED}),
    State.ENDED: frozenset(),
}


class IllegalTransition(RuntimeError):
    """A bug in the scheduler: the table above has no such arrow."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ends: with a last chunk (`reason`) or with an error, never both."""

    outcome: Outcome
    reason: FinishReason | None = None
    error: TritandemError | None = None
    engine_knows: bool = False  # the engine ended the sequence itself: nothing to cancel

    def __post_init__(self) -> None:
        if (self.reason is None) == (self.error is None):
            raise IllegalTransition("an ending has either a finish reason or an error")


class Life:
    """State of one request."""

    __slots__ = ("ending", "state")

    def __init__(self) -> None:
        self.state = State.WAITING
        self.ending: Ending | None = None

    def advance(self, to: State) -> bool:
        """Move on. False when the request has ended meanwhile; raises IllegalTransition off the table."""
        if self.state is State.ENDED:
            return False
        if to is State.ENDED or to not in ALLOWED[self.state]:
            raise IllegalTransition(f"{self.state.value} -> {to.value}")
        self.state = to
        return True

    def end(self, ending: Ending) -> bool:
        """End it. True for the first caller only, who then sees to everything that follows."""
        if self.state is State.ENDED:
            return False
        self.state, self.ending = State.ENDED, ending
        return True

    def amend(self, ending: Ending) -> None:
        """It had ended, but its end could not be delivered whole: what the client gets is this."""
        if self.ending is None:
            raise IllegalTransition("amended before its end")
        self.ending = ending


STOP_WORD = Ending(Outcome.COMPLETED, reason=FinishReason.STOP)
STOP_WORD_AT_END = Ending(Outcome.COMPLETED, reason=FinishReason.STOP, engine_knows=True)
STOPPED_BY_ID = Ending(Outcome.STOPPED, reason=FinishReason.CANCELLED)
CLIENT_GONE = Ending(Outcome.CANCELLED, error=RequestCancelled("the client closed or cancelled the stream"))

_OF_ENGINE = {
    FinishCode.STOP: STOP_WORD_AT_END,
    FinishCode.COMPLETE: STOP_WORD_AT_END,
    FinishCode.LENGTH: Ending(Outcome.COMPLETED, reason=FinishReason.LENGTH, engine_knows=True),
}


def ended_by_error(error: TritandemError, engine_knows: bool = False) -> Ending:
    """The error's class carries the outcome word."""
    return Ending(error.outcome, error=error, engine_knows=engine_knows)


def ended_by_engine(code: int, message: str | None) -> Ending:
    """From the finish code of a sequence's last row. CANCELLED that nobody here asked for is a failure."""
    finish = FinishCode(code)
    if finish in _OF_ENGINE:
        return _OF_ENGINE[finish]
    reason = message or ("the engine gave the sequence up" if finish is FinishCode.CANCELLED else "the engine failed")
    return ended_by_error(EngineFailed(reason), engine_knows=True)
