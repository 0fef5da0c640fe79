"""What to run for a step, decided on the host: the words that tell a device what changed, and which captured sizes it
replays. Several devices may execute the same program.

Pure; knows nothing about streams, graphs or weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...contracts.arrays import Int32Array
from ..rows.words import StepWords, pack_step
from ..step import PrefillChunk, RunnerSpec, SamplingFeatures, SlotInit, StepPlan
from .pass_size import DecodeSize, PassSize, rows_of_pass


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a record in order, without padding, from row `first` on."""

    slots: Sequence[int]
    first: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """One report in the ring: `rows` of them, padding included, and what of it is wanted."""

    rows: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class EagerChunks:
    """Chunks that run launch by launch: more than a graph holds, or a model that is not fused."""

    longest: int  # query tokens of the longest
    reach: int  # the longest context after this step
    firsts: int  # of them are their prompt's last
    scored: Sequence[PrefillChunk] = ()  # all of them, where any is scored


@dataclass(frozen=True, slots=True)
class Program:
    """One step. Order of effects: tables, words, rare values of new rows, block copies, the pass, the decode step."""

    words: StepWords | None  # None: nothing to tell
    rare: Sequence[SlotInit]  # new rows with what the words do not carry
    copies: Sequence[tuple[int, int]]  # of KV blocks, as in the plan
    size: PassSize | None  # of the captured pass that carries the chunks and, where it has rows, the decode rows
    firsts: int  # chunks of that pass that are their prompt's last
    eager: EagerChunks | None
    step: DecodeSize | None  # the decode step of its own, whose features may be more than those asked for
    features: SamplingFeatures
    decode_rows: tuple[int, ...]
    records: tuple[Record, ...]  # in the order in which they are written
    tables: Sequence[tuple[int, Int32Array]]  # new ones, by place


def make_program(
    plan: StepPlan,
    told_rows: tuple[int, ...],
    spec: RunnerSpec,
    pass_of: Callable[[int, Sequence[PrefillChunk]], PassSize | None],
    step_of: Callable[[int, SamplingFeatures], DecodeSize],
) -> Program:
    """`told_rows`: the decode rows that devices know already. `pass_of(decode rows, chunks)` and
    `step_of(rows, features)` choose among what is captured."""
    rows, features = tuple(plan.decode_slots), plan.features
    scored = any(chunk.targets is not None for chunk in plan.prefill)
    size = pass_of(len(rows), plan.prefill) if plan.prefill and not scored else None
    firsts = [chunk.slot for chunk in plan.prefill if chunk.last]
    records: list[Record] = []
    eager = None
    if size is not None:
        beside = (Part(rows),) if size.rows else ()
        records.append(Record(rows_of_pass(size, len(firsts), features), (Part(firsts, size.rows), *beside)))
    elif plan.prefill:
        longest = max(len(chunk.ids) for chunk in plan.prefill)
        reach = max(chunk.start + len(chunk.ids) for chunk in plan.prefill)
        eager = EagerChunks(longest, reach, len(firsts), plan.prefill if scored else ())
        if firsts:
            records.append(Record(len(firsts), (Part(firsts),)))
    step = step_of(len(rows), features) if rows and not (size is not None and size.rows) else None
    if step is not None:
        records.append(Record(step.rows, (Part(rows),)))
    return Program(
        words=pack_step(plan, bool(rows) and rows != told_rows, spec.max_context_tokens),
        rare=[init for init in plan.inits if init.rare],
        copies=plan.copies,
        size=size,
        firsts=len(firsts),
        eager=eager,
        step=step,
        features=features,
        decode_rows=rows,
        records=tuple(records),
        tables=plan.tables,
    )
