"""Structured answers on the device, in the Triton language: wait for the host's masks, take out of the choice what they
or a row's table do not allow, and follow the table.

The fast twins of `sampling/structure.py` and `SlotState.follow_tables`, for `runners/decode_step.py`. Masks, how many
records have them and the waiting times lie in pinned host memory. A kernel waits, not a wait node of the graph:
the number differs from step to step, and a kernel can give up.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from ..step import MASKED, TABLE_CLASSES, TABLE_STATES, TABLES
from .layout import OFFSETS, ROW_WORDS

_ROW_WORDS = tl.constexpr(ROW_WORDS)
_FINISHED = tl.constexpr(OFFSETS["finished"])
_STRUCTURE = tl.constexpr(OFFSETS["structure"])
_STATE = tl.constexpr(OFFSETS["structure_state"])
_LAST_TOKEN = tl.constexpr(OFFSETS["last_token"])
_MASKED = tl.constexpr(MASKED)
_TABLES = tl.constexpr(TABLES)
_CLASSES = tl.constexpr(TABLE_CLASSES)
_MOVES = tl.constexpr(TABLE_STATES * TABLE_CLASSES)  # bytes of a table behind the classes of its tokens
_FORBIDDEN = tl.constexpr(255)


@triton.jit(do_not_specialize=["ring_depth", "most_polls"])
def await_masks_kernel(
    ready,  # int64 [1] in host memory: the newest record whose masks are written
    record,  # int64 [1]: the one that this step fills
    late,  # int32 [1] out: 1: they have not come
    waits,  # int64 [ring_depth] in host memory, out: ns that a record's step waited
    ring_depth,
    most_polls,  # of about a microsecond each, the way over the bus and back
    TIMED: tl.constexpr,  # there is a clock
):
    """One program: more of them would only crowd the bus."""
    wanted = tl.load(record)
    polls = 0
    began = wanted
    if TIMED:
        began = globaltimer()
    seen = tl.load(ready, volatile=True)
    while (seen < wanted) & (polls < most_polls):
        polls += 1
        seen = tl.load(ready, volatile=True)
    if TIMED:
        tl.store(waits + wanted % ring_depth, globaltimer() - began)
    tl.store(late, (seen < wanted).to(tl.int32))


@triton.jit
def mask_kernel(
    logits,  # [R, V], changed
    rows,  # int64 [R] slots
    state,  # int32 [N + 1, ROW_WORDS]
    masks,  # int32 [N + 1, words] in host memory, a bit a token
    late,  # int32 [1]: 1: nothing is allowed, so that the row ends in error
    V,
    words,
    BLOCK: tl.constexpr,  # words of one program
):
    """-inf wherever the mask of a MASKED row has no bit. Reads past the caches: the host writes masks while kernels
    that were launched before run."""
    row = tl.program_id(0)
    slot = tl.load(rows + row)
    own = state + slot * _ROW_WORDS
    if (tl.load(own + _STRUCTURE) == _MASKED) & (tl.load(own + _FINISHED) == 0):
        word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        bits = tl.load(masks + slot * words + word, mask=word < words, other=0, volatile=True)
        bits = tl.where(tl.load(late) != 0, 0, bits)
        bit = tl.arange(0, 32)
        ids = word[:, None] * 32 + bit[None, :]
        forbidden = ((bits[:, None] >> bit[None, :]) & 1) == 0
        nothing = tl.full([BLOCK, 32], float("-inf"), tl.float32).to(logits.dtype.element_ty)
        tl.store(logits + row.to(tl.int64) * V + ids, nothing, mask=forbidden & (ids < V))


@triton.jit
def table_kernel(
    logits,  # [R, V], changed
    rows,  # int64 [R] slots
    state,  # int32 [N + 1, ROW_WORDS]
    tables,  # uint8 [places, tokens + _MOVES]
    V,
    tokens,
    BLOCK: tl.constexpr,
):
    """-inf wherever the table of a row has no next state from where the row is."""
    row = tl.program_id(0)
    own = state + tl.load(rows + row) * _ROW_WORDS
    kind = tl.load(own + _STRUCTURE)
    if (kind >= _TABLES) & (tl.load(own + _FINISHED) == 0):
        classes = tables + (kind - _TABLES).to(tl.int64) * (tokens + _MOVES)
        moves = classes + tokens + tl.load(own + _STATE) * _CLASSES
        ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        following = tl.load(moves + tl.load(classes + ids, mask=ids < V, other=0).to(tl.int32))
        nothing = tl.full([BLOCK], float("-inf"), tl.float32).to(logits.dtype.element_ty)
        tl.store(logits + row.to(tl.int64) * V + ids, nothing, mask=(following == _FORBIDDEN) & (ids < V))


@triton.jit
def follow_kernel(rows, state, tables, tokens):
    """As `table_kernel`; one program a row, behind the token that it took. Rows that have ended stay where they are."""
    own = state + tl.load(rows + tl.program_id(0)) * _ROW_WORDS
    kind = tl.load(own + _STRUCTURE)
    if (kind >= _TABLES) & (tl.load(own + _FINISHED) == 0):
        classes = tables + (kind - _TABLES).to(tl.int64) * (tokens + _MOVES)
        moves = classes + tokens + tl.load(own + _STATE) * _CLASSES
        of_token = tl.load(classes + tl.load(own + _LAST_TOKEN)).to(tl.int32)
        tl.store(own + _STATE, tl.load(moves + of_token).to(tl.int32))
