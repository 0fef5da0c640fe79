"""What the device must be told before a step: membership changes, decode rows and prompt chunks as one run of words.

Owns the packing on the host and the launch that spreads the words into slot rows and the inputs of a pass.
What a row seldom has travels by itself (`SlotState.write_rare`). Core thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ...contracts import Int32Array
from ..attention.interface import AttentionBatch
from ..step import StepPlan
from .layout import INIT_HEAD, INIT_WORDS, ROW_WORDS, WORD_BYTES, pack_row
from .state import SlotState
from .write_kernels import begin_pass_kernel, step_input_kernel

_ALIGN = 4  # arrays begin at multiples of 16 bytes, which kernels are compiled for
_BLOCK = 128  # lanes of a program; no fewer than a row has stop ids
_CHUNKS = 32


@dataclass(frozen=True, slots=True)
class PassInputs:
    """The device's arrays of a pass over T packed tokens of C chunks, padding included. Padding belongs to the pad
    slot, whose blocks are the null block."""

    token_slots: torch.Tensor  # int64 [T]
    slots: torch.Tensor  # int64 [C]
    last_rows: torch.Tensor  # int64 [C] packed index of the end of each chunk that is its prompt's last
    last_slots: torch.Tensor  # int64 [C] their slots
    ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T]
    starts: torch.Tensor  # int32 [C + 1]
    context_lens: torch.Tensor  # int32 [C]
    pick: torch.Tensor  # int32 [1]: 1 where the pass itself picks tokens
    longs: torch.Tensor  # what the int64 arrays are views of
    ints: torch.Tensor

    @classmethod
    def views(cls, tokens: int, chunks: int, longs: torch.Tensor, ints: torch.Tensor) -> PassInputs:
        """Of a pass of this size in buffers of at least `pass_words`."""
        wide, each = _aligned(tokens), _aligned(chunks + 1)
        return cls(
            token_slots=longs[:tokens],
            slots=longs[wide : wide + chunks],
            last_rows=longs[wide + each : wide + each + chunks],
            last_slots=longs[wide + 2 * each : wide + 2 * each + chunks],
            ids=ints[:tokens],
            positions=ints[wide : wide + tokens],
            starts=ints[2 * wide : 2 * wide + chunks + 1],
            context_lens=ints[2 * wide + each : 2 * wide + each + chunks],
            pick=ints[2 * wide + 2 * each : 2 * wide + 2 * each + 1],
            longs=longs,
            ints=ints,
        )

    @classmethod
    def empty(cls, tokens: int, chunks: int, device: torch.device) -> PassInputs:
        wide, each = _aligned(tokens), _aligned(chunks + 1)
        longs = torch.empty(wide + 3 * each, dtype=torch.int64, device=device)
        ints = torch.empty(2 * wide + 2 * each + 1, dtype=torch.int32, device=device)
        return cls.views(tokens, chunks, longs, ints)

    def batch(self, state: SlotState, block_tokens: int, max_query_tokens: int, max_context: int) -> AttentionBatch:
        positions = self.positions.long()
        blocks = state.block_table[self.token_slots, positions // block_tokens].long()
        return AttentionBatch(
            slot_mapping=blocks * block_tokens + positions % block_tokens,
            block_tables=state.block_table[self.slots],
            context_lens=self.context_lens,
            query_starts=self.starts,
            max_query_tokens=max_query_tokens,
            max_context_tokens=max_context,
            decode=False,
        )


@dataclass(frozen=True, slots=True)
class PassBatch:
    """What a pass over S decode rows and T tokens of C chunks feeds to the model."""

    ids: torch.Tensor  # int64 [S + T]
    positions: torch.Tensor  # int64 [T]
    logit_rows: torch.Tensor  # int64 [S + C] packed index of every row whose logits are wanted
    row_lens: torch.Tensor  # int32 [S] context lengths of the decode rows, 0 for idle ones
    chunks: AttentionBatch


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


def pack_step(plan: StepPlan, new_rows: bool, vocab_size: int, max_context_tokens: int) -> StepWords | None:
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
            pack_row(packed, (number * INIT_WORDS + INIT_HEAD) * WORD_BYTES, init, vocab_size, max_context_tokens)
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


def spread(
    words: torch.Tensor, counts: StepWords, state: SlotState, rows: torch.Tensor, target: PassInputs | None, pick: bool
) -> None:
    """Bring packed words (int32, device) where the step's kernels look for them: `state`, the decode step's `rows`
    (int64 [max_rows], the pad slot behind those given) and, where there are chunks, the pass's inputs."""
    tokens, chunks = (target.token_slots.shape[0], target.slots.shape[0]) if target is not None else (0, 0)
    max_rows = rows.shape[0]
    programs = counts.inits + counts.releases - (-counts.updates // _BLOCK)
    if counts.decode_rows >= 0:
        programs -= -max_rows // _BLOCK
    if target is not None:
        programs += 1 - (-tokens // _BLOCK)
    step_input_kernel[(programs,)](
        words,
        state.words,
        state.block_table,
        rows,
        target.longs if target is not None else rows,
        target.ints if target is not None else words,
        counts.inits,
        counts.releases,
        counts.updates,
        counts.decode_rows,
        counts.chunks,
        counts.lasts,
        counts.tokens,
        tokens,
        chunks,
        int(pick),
        state.pad_slot,
        max_rows,
        state.block_table.shape[1],
        ALIGN=_ALIGN,
        BLOCK=_BLOCK,
        CHUNKS=_CHUNKS,
        ROW_PAD=1 << (ROW_WORDS - 1).bit_length(),
        num_warps=4,
    )


def begin_pass(
    inputs: PassInputs,
    state: SlotState,
    rows: torch.Tensor,
    choosing: torch.Tensor,
    block_tokens: int,
    record: torch.Tensor,
) -> PassBatch:
    """Read in one launch what a pass over `rows` (int64 [S]) and the chunks in `inputs` feeds to the model; the fast
    twin of `PassInputs.batch`. Brings the chunks' lengths up to date, writes the slot behind every row of logits to
    `choosing` (int64 [S + C]) and counts `record` (int64 [1]) up."""
    count, (tokens, chunks) = len(rows), (inputs.token_slots.shape[0], inputs.slots.shape[0])
    device, max_blocks = rows.device, state.block_table.shape[1]
    ids = torch.empty(count + tokens, dtype=torch.int64, device=device)
    positions, slot_mapping = (torch.empty(tokens, dtype=torch.int64, device=device) for _ in range(2))
    logit_rows = torch.empty(count + chunks, dtype=torch.int64, device=device)
    row_lens = torch.empty(count, dtype=torch.int32, device=device)
    tables = torch.empty((chunks, max_blocks), dtype=torch.int32, device=device)
    begin_pass_kernel[(chunks - (-count // _BLOCK) - (-tokens // _BLOCK),)](
        rows,
        state.words,
        state.block_table,
        inputs.token_slots,
        inputs.slots,
        inputs.last_rows,
        inputs.last_slots,
        inputs.ids,
        inputs.positions,
        inputs.context_lens,
        ids,
        positions,
        slot_mapping,
        row_lens,
        tables,
        logit_rows,
        choosing,
        record,
        count,
        tokens,
        chunks,
        block_tokens,
        max_blocks,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    reach = max_blocks * block_tokens
    batch = AttentionBatch(slot_mapping, tables, inputs.context_lens, inputs.starts, tokens, reach, decode=False)
    return PassBatch(ids, positions, logit_rows, row_lens, batch)


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN
