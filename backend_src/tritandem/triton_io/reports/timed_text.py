"""Detokenization with a clock: what the scheduler asks of the text side, and how long each flush took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ...contracts.arrays import Int32Array
from ...scheduler.ports import TextStep, TextStreamsPort
from ...telemetry.duration_counts import DurationCounts


class TimedTextStreams:
    """`TextStreamsPort` in front of another one."""

    def __init__(self, streams: TextStreamsPort, times: DurationCounts) -> None:
        self._streams, self._times = streams, times
        self.open, self.flush, self.stop_word = streams.open, streams.flush, streams.stop_word

    def push(self, states: list[Any], tokens: Int32Array, counts: Int32Array, /) -> Sequence[TextStep]:
        begun_ns = time.monotonic_ns()
        steps = self._streams.push(states, tokens, counts)
        self._times.note(time.monotonic_ns() - begun_ns)
        return steps
