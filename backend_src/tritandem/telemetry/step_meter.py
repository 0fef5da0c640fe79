"""What an engine's core thread notes of every step: a few list updates, no lock, no message.

Knows nothing about devices or where the numbers go. A note costs about 0.2 microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from .duration_counts import DurationCounts
from .families import (
    DECODE_STEP,
    GRAMMAR_COMPILE,
    GRAMMAR_MASKS,
    GRAMMAR_WAIT,
    GRAPH_LAUNCH,
    LAUNCH_SKEW,
    STEP_IDLE,
)


class StepMeter:
    """`busy` is true from the first launch until no sequence is left: a gap between steps counts only then."""

    def __init__(self, engine: str) -> None:
        """`engine`: the label that keeps one engine's series apart from another's."""
        self.engine = engine
        self.busy = False
        self.decode_step = DurationCounts(DECODE_STEP, engine=engine)
        self.idle_gap = DurationCounts(STEP_IDLE, engine=engine)
        self.launch_skew = DurationCounts(LAUNCH_SKEW, engine=engine)
        self.grammar_compile = DurationCounts(GRAMMAR_COMPILE, engine=engine)
        self.grammar_masks = DurationCounts(GRAMMAR_MASKS, engine=engine)
        self.grammar_wait = DurationCounts(GRAMMAR_WAIT, engine=engine)
        self.gpu_uuid = ""  # as nvidia-smi writes it; "" on a CPU
        self.staged_bytes: Callable[[], Mapping[str, int]] = dict  # totals by kind of memory; any thread
        self._decode_launch = DurationCounts(GRAPH_LAUNCH, engine=engine, phase="decode")
        self._prefill_launch = DurationCounts(GRAPH_LAUNCH, engine=engine, phase="prefill")

    def launched(self, duration_ns: int, prefills: bool) -> None:
        """The host spent this on handing a step to the device."""
        self.busy = True
        (self._prefill_launch if prefills else self._decode_launch).note(duration_ns)

    def histograms(self) -> tuple[DurationCounts, ...]:
        steps = self.decode_step, self.idle_gap, self._decode_launch, self._prefill_launch
        return (*steps, self.launch_skew, self.grammar_compile, self.grammar_masks, self.grammar_wait)
