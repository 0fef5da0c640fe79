"""Masks of launched steps: what the structures of answers allow next, told to the device in time.

A mask needs the token before it, so that a step with masked rows which was launched behind another waits on the
device, between its logits and the choice, until that other's tokens were taken here; its forward hides the work. One
step at most waits so, the newest. One thread, the core's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

from ...contracts.errors import EngineFailed
from ...grammar import Matcher
from ...telemetry.step_meter import StepMeter
from ..step import STRUCTURED, Runner, StepPlan
from ..structure.tables import Walker
from ..structure.threads import mask_pool
from .sequence import SequenceState

SLOW_STEP_NS = 20_000_000  # for all masks of a step: who took so long?
SLOW_MASK_NS = 5_000_000  # for one mask; the usual one takes a hundredth of a millisecond
MANY_SLOW_MASKS = 8  # of one answer, which ends for the others' sake
Lost = list[tuple[SequenceState, str]]  # whose structure cannot be followed any more, and why


class MaskServer:
    def __init__(self, runner: Runner, meter: StepMeter | None) -> None:
        self._runner, self._meter = runner, meter
        self._look_closer = False  # the masks before these took long
        self._waiting: StepPlan | None = None

    @property
    def waited_for(self) -> bool:
        """A launched step has no masks yet. Nothing may be launched behind it: whatever made that launch wait for the
        device would wait for ever."""
        return self._waiting is not None

    def before_launch(self, plan: StepPlan, running: Sequence[SequenceState], behind: bool) -> Lost:
        """`behind`: results of an earlier step were not taken; else all tokens are known already."""
        return [] if behind else self._write(plan, running, waited=True)

    def launched(self, plan: StepPlan, behind: bool) -> None:
        if plan.masked_slots:
            if behind:
                self._waiting = plan
            else:
                self._runner.masks_ready(plan.step_id)

    def serve(self, oldest: int, running: Sequence[SequenceState]) -> Lost:
        """All tokens before step `oldest`, which runs now, were taken."""
        if self._waiting is None or self._waiting.step_id != oldest:
            return []
        try:
            return self._write(self._waiting, running, waited=False)
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Let the device go on, whatever its masks say: nobody will look at the tokens."""
        if self._waiting is not None:
            self._runner.masks_ready(self._waiting.step_id)
            self._waiting = None

    def _write(self, plan: StepPlan, running: Sequence[SequenceState], waited: bool) -> Lost:
        """`waited`: the launch waits meanwhile; else the device says whether its step did."""
        slots = set(plan.masked_slots)
        masked = [s for s in running if STRUCTURED in s.features and s.slot in slots] if slots else []
        if not masked:
            return []
        started_ns = time.monotonic_ns()
        matched = []
        for sequence in masked:
            if isinstance(sequence.structure, Walker):  # the device has no place for its table
                self._runner.masks[sequence.slot] = sequence.structure.mask()
            elif sequence.structure is not None:
                matched.append((sequence, sequence.structure))
        if self._look_closer:
            self._look_closer = self._write_one_by_one(matched)
        elif matched:
            mask_pool().fill([(matcher, s.slot) for s, matcher in matched], self._runner.masks)
            self._look_closer = time.monotonic_ns() - started_ns > SLOW_STEP_NS
        if self._meter is not None:
            taken_ns = time.monotonic_ns() - started_ns
            self._meter.grammar_masks.note(taken_ns)
            if waited:
                self._meter.grammar_wait.note(taken_ns)
        return [(s, reason) for s in masked if (reason := _failed(s))]

    def _write_one_by_one(self, matched: list[tuple[SequenceState, Matcher]]) -> bool:
        """Whether some of them take too long, by this thread's own time: the machine's other work does not count."""
        slow = False
        for sequence, matcher in matched:
            started_ns = time.thread_time_ns()
            with suppress(EngineFailed):  # found again by `_failed`
                matcher.mask_into(self._runner.masks[sequence.slot])
            if time.thread_time_ns() - started_ns > SLOW_MASK_NS:
                sequence.slow_masks += 1
                slow = True
        return slow


def _failed(sequence: SequenceState) -> str:
    if sequence.slow_masks >= MANY_SLOW_MASKS:
        return f"its structure takes more than {SLOW_MASK_NS / 1e6:.0f} ms a token to follow; others would wait for it"
    try:
        if sequence.structure is not None:
            sequence.structure.check()
    except EngineFailed as error:
        return str(error)
    return ""
