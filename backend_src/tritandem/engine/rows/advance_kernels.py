"""What a decode step does around the model, in the Triton language: read rows, pick greedily, advance, report.

Owns the kernels only; `runners/decode_step.py` launches them. `greedy_advance_kernel` is the fast twin of
`sampler.sample` followed by `SlotState.advance` for rows that are all greedy. The report ring lies in pinned
host memory and is written from here directly.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ...contracts.fields import MAX_STOP_TOKEN_IDS
from ...contracts.stream import FinishCode
from .layout import OFFSETS, RECENT_TOKENS, ROW_WORDS

_ROW_WORDS = tl.constexpr(ROW_WORDS)
_LAST_TOKEN = tl.constexpr(OFFSETS["last_token"])
_LENGTH = tl.constexpr(OFFSETS["length"])
_REMAINING = tl.constexpr(OFFSETS["remaining"])
_PRODUCED = tl.constexpr(OFFSETS["produced"])
_FINISHED = tl.constexpr(OFFSETS["finished"])
_MIN_TOKENS = tl.constexpr(OFFSETS["min_tokens"])
_STOP_IDS = tl.constexpr(OFFSETS["stop_ids"])
_RECENT = tl.constexpr(OFFSETS["recent"])
_STOPS = tl.constexpr(MAX_STOP_TOKEN_IDS)
_RECENT_TOKENS = tl.constexpr(RECENT_TOKENS)
_STOP = tl.constexpr(int(FinishCode.STOP))
_LIMIT = tl.constexpr(int(FinishCode.LENGTH))
_ERROR = tl.constexpr(int(FinishCode.ERROR))


@triton.jit
def begin_kernel(
    rows,  # int64 [R] slots
    state,  # int32 [N + 1, ROW_WORDS]
    ids,  # int64 [R] out
    positions,  # int64 [R] out
    context_lens,  # int32 [R] out: 0 for idle rows
    record,  # int64 [1] number of the report this step writes: counted up
):
    row = tl.program_id(0)
    own = state + tl.load(rows + row) * _ROW_WORDS
    at = tl.load(own + _LENGTH)
    idle = tl.load(own + _FINISHED) != 0
    tl.store(ids + row, tl.load(own + _LAST_TOKEN).to(tl.int64))
    tl.store(positions + row, at.to(tl.int64))
    tl.store(context_lens + row, tl.where(idle, 0, at + 1))
    if row == 0:
        tl.store(record, tl.load(record) + 1)


@triton.jit
def argmax_kernel(
    logits,  # [R, V]
    rows,  # int64 [R] slots
    active,  # int32 [1]: 0 makes every row idle
    state,  # int32 [N + 1, ROW_WORDS]
    best,  # float32 [R, PARTS] out
    best_ids,  # int32 [R, PARTS] out
    V,
    PARTS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """Largest logit of each part of the vocabulary; a NaN wins so that it is noticed. First id on ties."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    own = state + tl.load(rows + row) * _ROW_WORDS
    top = float("-inf")
    top_id = 0
    idle = (tl.load(own + _FINISHED) != 0) | (tl.load(active) == 0)
    early = tl.load(own + _PRODUCED) < tl.load(own + _MIN_TOKENS)
    per_part = tl.cdiv(tl.cdiv(V, PARTS), BLOCK_V) * BLOCK_V
    end = tl.where(idle, 0, tl.minimum((part + 1) * per_part, V))
    for start in range(part * per_part, end, BLOCK_V):
        ids = start + tl.arange(0, BLOCK_V)
        values = tl.load(logits + row.to(tl.int64) * V + ids, mask=ids < V, other=float("-inf")).to(tl.float32)
        if early:
            for stop in range(_STOPS):
                values = tl.where(ids == tl.load(own + _STOP_IDS + stop), float("-inf"), values)
        values = tl.where(values != values, float("inf"), values)
        value, index = tl.max(values, axis=0, return_indices=True)
        if value > top:
            top_id = start + index
            top = value
    tl.store(best + row * PARTS + part, top)
    tl.store(best_ids + row * PARTS + part, top_id)


@triton.jit(do_not_specialize=["decoding", "row_count"])
def greedy_advance_kernel(
    best,
    best_ids,
    rows,  # as in `argmax_kernel`
    active,
    decoding,  # so many of the rows, the first ones, have stored one more token
    state,
    record,  # int64 [1]
    ring,  # int32 [DEPTH, record_words] in pinned host memory
    ring_depth,
    record_words,
    row_count,
    PARTS: tl.constexpr,
    RECENT_PAD: tl.constexpr,
):
    """Combine the parts into a token and do what `SlotState.advance` does; one program a row."""
    row = tl.program_id(0)
    own = state + tl.load(rows + row) * _ROW_WORDS
    parts = tl.arange(0, PARTS)
    values = tl.load(best + row * PARTS + parts)
    top, index = tl.max(values, axis=0, return_indices=True)
    token = tl.load(best_ids + row * PARTS + index)
    idle = (tl.load(own + _FINISHED) != 0) | (tl.load(active) == 0)
    left = tl.load(own + _REMAINING) - 1
    stops = tl.load(own + _STOP_IDS + tl.arange(0, _STOPS))
    stopped = tl.max((stops == token).to(tl.int32), axis=0) > 0
    broken = (top == float("inf")) | (top == float("-inf"))
    finish = tl.where(left <= 0, _LIMIT, 0)
    finish = tl.where(stopped, _STOP, finish)
    finish = tl.where(broken, _ERROR, finish)
    finish = tl.where(idle, 0, finish)
    if not idle:
        columns = tl.arange(0, RECENT_PAD)
        recent = own + _RECENT + columns
        moved = tl.load(recent + 1, mask=columns + 1 < _RECENT_TOKENS, other=0)
        moved = tl.where(columns == _RECENT_TOKENS - 1, token, moved)
        tl.debug_barrier()
        tl.store(recent, moved, mask=columns < _RECENT_TOKENS)
        tl.store(own + _LAST_TOKEN, token)
        tl.store(own + _REMAINING, left)
        tl.store(own + _PRODUCED, tl.load(own + _PRODUCED) + 1)
        tl.store(own + _FINISHED, (finish != 0).to(tl.int32))
        tl.store(own + _LENGTH, tl.load(own + _LENGTH) + (row < decoding).to(tl.int32))
    out = ring + (tl.load(record) % ring_depth) * record_words + row
    tl.store(out, tl.where(idle, -1, token))
    tl.store(out + row_count, finish)


@triton.jit
def keep_logits_kernel(logits, kept, active, count, BLOCK: tl.constexpr):
    """Copy `count` logits for a choice that comes later, which is none where `active` (int32 [1]) holds."""
    if tl.load(active) == 0:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(kept + at, tl.load(logits + at, mask=at < count), mask=at < count)


@triton.jit
def report_kernel(
    tokens,  # int32 [R]
    finish,  # uint8 [R]
    logprobs,  # float32 [R]
    top_ids,  # int32 [R, K]
    top_logprobs,  # float32 [R, K]
    record,
    ring,
    ring_depth,
    record_words,
    row_count,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    HAS_LOGPROBS: tl.constexpr,
):
    """Write one row of a sampled step's results into the ring: [token | finish | logprob | ids | logprobs]."""
    row = tl.program_id(0)
    out = ring + (tl.load(record) % ring_depth) * record_words
    tl.store(out + row, tl.load(tokens + row))
    tl.store(out + row_count + row, tl.load(finish + row).to(tl.int32))
    if HAS_LOGPROBS:
        tl.store(out + 2 * row_count + row, tl.load(logprobs + row).to(tl.int32, bitcast=True))
    if K > 0:
        columns = tl.arange(0, K_PAD)
        ok = columns < K
        at = out + 3 * row_count + row * K + columns
        tl.store(at, tl.load(top_ids + row * K + columns, mask=ok), mask=ok)
        values = tl.load(top_logprobs + row * K + columns, mask=ok).to(tl.int32, bitcast=True)
        tl.store(at + row_count * K, values, mask=ok)
