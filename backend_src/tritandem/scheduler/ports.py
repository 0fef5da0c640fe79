"""What the scheduler asks of its neighbours, as structural types, so that it imports none of them.

`EnginePort` and `ResponseSink` live in `contracts`; here are the text side (the tokenizer room implements it)
and the observer (metrics). Knows nothing about how any of them works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..contracts.answers import Stamps
from ..contracts.arrays import Int32Array
from ..contracts.errors import Outcome
from ..contracts.requests import PriorityClass
from ..contracts.stream import LoadSnapshot
from .batch_limits import BatchLimits


class TextStep(Protocol):
    """What one row of tokens became."""

    @property
    def text(self) -> str:
        """Text that may be shown now; never half a character, never part of a possible stop word."""

    @property
    def stopped(self) -> bool:
        """A stop word is complete: `text` ends before it and nothing more will come."""

    @property
    def tokens_used(self) -> int:
        """How many of the row's tokens were taken; fewer than given only when `stopped`."""


class TextStreamsPort(Protocol):
    """Incremental detokenization. Distinct states may be used from distinct threads at the same time."""

    def open(
        self, prompt_ids: Int32Array, stop_words: tuple[str, ...], min_tokens: int, control_tokens: bool, /
    ) -> Any:
        """The state of one answer; opaque here."""

    def push(self, states: list[Any], tokens: Int32Array, counts: Int32Array, /) -> Sequence[TextStep]:
        """One call per flush: `counts[i]` (>= 0) tokens of the flat `tokens` belong to `states[i]`."""

    def flush(self, state: Any, /) -> str:
        """What was held back, at the end of an answer."""

    def stop_word(self, state: Any, /) -> str:
        """What a step with `stopped` has found."""


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One line per request for metrics and the log; made after the client's last response."""

    request_id: str
    outcome: Outcome
    priority: PriorityClass
    tenant: str
    stamps: Stamps
    num_input_tokens: int
    num_output_tokens: int
    cached_tokens: int
    num_responses: int
    engine: str  # "" when it never reached one
    error: str  # public message, "" when there is none
    trace_parent: str = ""  # W3C traceparent of the span above, "" when there is none
    sequences: int = 1  # answers that were asked for
    longest_pause_ns: int = 0  # between two responses of one answer
    seed: int | None = None  # of the random stream, None when there was nothing to draw


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine as the scheduler sees it."""

    name: str
    health: str  # connecting | up | down
    limits: BatchLimits
    load: LoadSnapshot


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """Gauges and counters at one moment."""

    waiting: Mapping[PriorityClass, int]
    running: int  # handed to an engine and not ended
    buffered_chars: int  # text that senders have not taken yet
    engines: tuple[EngineStatus, ...]


class Observer(Protocol):
    """Metrics and log. Called on the scheduler's threads: must be cheap and must not block."""

    def finished(self, record: FinishedRequest) -> None:
        """Once per request."""

    def gauges(self, snapshot: SchedulerSnapshot) -> None:
        """About once a second."""
