"""The device's side of a step's words: one launch spreads them into slot rows and the inputs of a pass, another reads
what a pass feeds to the model.

Owns the launches and the arrays of a pass. Core thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..attention.interface import AttentionBatch
from .layout import ROW_WORDS
from .state import SlotState
from .words import StepWords
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
            slots=self.slots,
        )


@dataclass(frozen=True, slots=True)
class PassBatch:
    """What a pass over S decode rows and T tokens of C chunks feeds to the model."""

    ids: torch.Tensor  # int64 [S + T]
    positions: torch.Tensor  # int64 [T]
    logit_rows: torch.Tensor  # int64 [S + C] packed index of every row whose logits are wanted
    row_lens: torch.Tensor  # int32 [S] context lengths of the decode rows, 0 for idle ones
    chunks: AttentionBatch


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
