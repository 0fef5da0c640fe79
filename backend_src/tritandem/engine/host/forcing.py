"""Runs of tokens that the structure of an answer leaves no choice about: taken without being chosen one by one.

At the beginning of an answer they are prefilled behind its prompt. In its middle, where few sequences run, its row
skips decoding: steps in flight choose the first of the run, and a chunk stores the others and chooses what follows. The
row begins anew with all of them as its output, so that budgets and random numbers are those of single steps.
One thread, the core's. Knows nothing about blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..step import ALLOWED_TOKENS, BAD_WORDS, LOGIT_BIAS, PENALISED, RunnerSpec
from .batcher import FEW_DECODING
from .sequence import NO_SLOT, SequenceState

LEAST_RUN = 4  # tokens; a chunk beside decoding rows costs the others a little
_CHOOSING = {PENALISED, BAD_WORDS, LOGIT_BIAS, ALLOWED_TOKENS}  # their tables must see each token


@dataclass(frozen=True, slots=True)
class Forcing:
    """`least_run` tokens are taken so, shorter runs chosen; 0: all are chosen. `most_running` sequences in whose middle
    that is done: beside many a chunk costs more than the steps of one answer."""

    least_run: int = LEAST_RUN
    most_running: int = FEW_DECODING

    @classmethod
    def of(cls, least_run: int, spec: RunnerSpec) -> Forcing:
        """Where chunks are launched kernel by kernel, one costs more than the steps it saves."""
        launched_one_by_one = spec.launch_ahead_steps > 0 and not spec.pass_tokens
        # Rows are begun anew from their blocks when a step fails: with windows some are gone.
        return cls(least_run, 0 if launched_one_by_one or spec.window_tokens is not None else FEW_DECODING)

    def begin(self, sequence: SequenceState) -> None:
        """Take what the answer must begin with. It was not admitted yet."""
        alone = not (sequence.family or sequence.scoring)  # others begin on the blocks of its prompt alone
        if self.least_run and alone and _may_be(sequence):
            sequence.forced = self._run(sequence, 0)
            sequence.take_forced()

    def ready(self, decoded: Iterable[SequenceState], running: int) -> list[tuple[SequenceState, list[int]]]:
        """Which of `decoded` skip decoding now, and what must follow their `output_ids`: what steps in flight will
        choose, and enough behind it."""
        if not self.least_run or running > self.most_running:
            return []
        found = []
        for sequence in decoded:
            free = not (sequence.finish or sequence.forced) and sequence.slot != NO_SLOT
            if sequence.structure is not None and free and sequence.decodable and _may_be(sequence):
                found.append((sequence, self._run(sequence, sequence.promised - len(sequence.output_ids))))
        return [(sequence, run) for sequence, run in found if run]

    def _run(self, sequence: SequenceState, in_flight: int) -> list[int]:
        """[] where it is too short. Neither the end of the answer nor of its budget is in it."""
        structure = sequence.structure
        assert structure is not None
        run = structure.forced_tokens()
        run = run[: max(0, sequence.output_budget - len(sequence.output_ids) - 1)]
        stops = {*sequence.request.stop_ids, *structure.vocabulary.end_ids}
        run = run[: next((at for at, token in enumerate(run) if token in stops), len(run))]
        if len(run) - in_flight < self.least_run:
            return []
        ahead = structure.copy()
        taken = sum(ahead.accept(token) for token in run)
        if ahead.is_over():
            taken -= 1
        return run[:taken] if taken - in_flight >= self.least_run else []


def _may_be(sequence: SequenceState) -> bool:
    asked = sequence.request.sampling.logprobs is not None or _CHOOSING & sequence.features
    return sequence.structure is not None and not asked
