"""A step's changes, decode rows and prompt chunks as one run of int32 words: what a device must be told before it.

Pure; on the host. What a row seldom has does not travel in here (`SlotState.write_rare`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...contracts.arrays import Int32Array
from ..step import StepPlan
from .layout import INIT_HEAD, INIT_WORDS, WORD_BYTES, pack_row


@dataclass(frozen=True, slots=True)
class StepWords:
    """int32 arrays in the kernel's order, and how many there are of each kind."""

    arrays: list[Int32Array]
    inits: int = 0
    releases: int = 0
    updates: int = 0
    decode_rows: int = -1  # negative: as in the step before
    chunks: int = 0
    lasts: int = 0
    tokens: int = 0


def pack_step(plan: StepPlan, new_rows: bool, max_context_tokens: int) -> StepWords | None:
    """The plan's changes and chunks; its decode rows if they are `new_rows`. None: there is nothing to tell."""
    updates = plan.block_updates if plan.block_updates is not None and len(plan.block_updates) else None
    if not (plan.inits or plan.releases or plan.prefill or new_rows or updates is not None):
        return None
    returning = {init.slot for init in plan.inits} if plan.releases else set()
    releases = [slot for slot in plan.releases if slot not in returning]  # an init rewrites the row as well
    arrays: list[Int32Array] = []
    if plan.inits or releases:
        changed = [*(init.slot for init in plan.inits), *releases]
        begins = ends = [0] * len(changed)
        if updates is not None:
            updates = updates[updates[:, 0].argsort(kind="stable")]
            slots, wanted = updates[:, 0], np.array(changed, np.int32)
            begins, ends = slots.searchsorted(wanted).tolist(), slots.searchsorted(wanted, "right").tolist()
        count = len(plan.inits)
        packed = bytearray(count * INIT_WORDS * WORD_BYTES)
        for number, init in enumerate(plan.inits):
            pack_row(packed, (number * INIT_WORDS + INIT_HEAD) * WORD_BYTES, init, max_context_tokens)
        inits = np.frombuffer(packed, np.int32).reshape(count, INIT_WORDS)
        inits[:, :INIT_HEAD] = np.array([changed, begins, ends], np.int32)[:, :count].T
        arrays.append(inits.reshape(-1))
        if releases:
            arrays.append(np.array([releases, begins[count:], ends[count:]], np.int32).T.reshape(-1))
    lasts = tokens = 0
    if plan.prefill:
        table: list[int] = []
        for chunk in plan.prefill:
            table += (chunk.slot, chunk.start, tokens, lasts if chunk.last else -1)
            tokens += len(chunk.ids)
            lasts += chunk.last
        arrays.append(np.array(table, np.int32))
    if updates is not None:
        arrays.append(updates.reshape(-1))
    if new_rows:
        arrays.append(np.array(plan.decode_slots, np.int32))
    arrays += [chunk.ids for chunk in plan.prefill]
    return StepWords(
        arrays,
        inits=len(plan.inits),
        releases=len(releases),
        updates=len(updates) if updates is not None else 0,
        decode_rows=len(plan.decode_slots) if new_rows else -1,
        chunks=len(plan.prefill),
        lasts=lasts,
        tokens=tokens,
    )
