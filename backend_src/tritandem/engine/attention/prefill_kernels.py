"""Paged attention in the Triton language: prefill over packed sequences, causal over all that is cached of each.

Owns the kernel only; sizes and launches are in `paged_cuda.py`. Imported on CUDA machines alone (needs
`triton`). The online softmax follows Dao et al., "FlashAttention-2" (2023).
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from .paged_kernels import as_multiplied, capped


@triton.jit
def _context_tile(
    q,
    acc,
    best,
    total,
    tile,
    stop,
    positions_q,
    table,
    key_cache,
    value_cache,
    kv_head,
    scaling,
    softcap,
    window,
    KVH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """One step of the online softmax over positions [tile, tile + BLOCK_N). Without MASKED every query sees all of
    them, and all lie before `stop`; `best` is in units of log2."""
    LOG2E: tl.constexpr = 1.4426950408889634
    positions = tile + tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    live = positions < stop
    if HAS_WINDOW:  # before the first query's may lie blocks that belong to others by now
        live = live & (positions > tl.min(positions_q, axis=0) - window)
    if MASKED:
        blocks = tl.load(table + positions // BLOCK_TOKENS, mask=live, other=0).to(tl.int64)
    else:
        blocks = tl.load(table + positions // BLOCK_TOKENS).to(tl.int64)
    at = ((blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS) * KVH + kv_head) * D
    if MASKED or D != BLOCK_D:
        k = tl.load(key_cache + at[None, :] + dims[:, None], mask=live[None, :] & (dims < D)[:, None], other=0.0)
        v = tl.load(value_cache + at[:, None] + dims[None, :], mask=live[:, None] & (dims < D)[None, :], other=0.0)
    else:
        k = tl.load(key_cache + at[None, :] + dims[:, None])
        v = tl.load(value_cache + at[:, None] + dims[None, :])
    k = k.to(q.dtype)
    v = v.to(q.dtype)
    scores = tl.dot(q, k, input_precision="ieee")
    unit = scaling * LOG2E
    if HAS_SOFTCAP:
        scores = capped(scores * scaling, softcap, HAS_SOFTCAP)
        unit = LOG2E
    if MASKED:
        seen = (positions[None, :] <= positions_q[:, None]) & live[None, :]
        if HAS_WINDOW:
            seen = seen & (positions[None, :] > positions_q[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    new_best = tl.maximum(best, tl.max(scores, axis=1) * unit)
    shift = new_best
    if MASKED:  # a tile can lie outside the window of a query: keep exp2 away from (-inf) - (-inf)
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores * unit - shift[:, None])
    decay = tl.exp2(best - shift)
    total = total * decay + tl.sum(weights, axis=1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, new_best, total


@triton.jit(do_not_specialize=["S"])  # one binary for any number of sequences
def prefill_kernel(
    query,  # [T, query_stride]: H heads of D
    key_cache,  # [num_blocks, BLOCK_TOKENS, KVH, D]
    value_cache,
    block_tables,  # int32 [S, table_stride]
    context_lens,  # int32 [S]
    query_starts,  # int32 [S + 1]
    sink_logits,  # HAS_SINK: [H]
    out,  # [T, H, D]
    scaling,
    softcap,
    query_stride,
    table_stride,
    window,
    S,
    H: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINK: tl.constexpr,
    KV_FP8: tl.constexpr,
):
    """One program: one head, BLOCK_M queries of one sequence; the grid's second dimension counts such tiles over all
    sequences and may be larger than their number. `scaling` is positive."""
    head = tl.program_id(0)
    rows = tl.arange(0, BLOCK_S)
    starts = tl.load(query_starts + rows, mask=rows < S, other=0)
    ends = tl.load(query_starts + rows + 1, mask=rows < S, other=0)
    tiles = tl.cdiv(ends - starts, BLOCK_M)
    # The last tile of a sequence sees the most context: it goes first, so that the tail of the grid is short.
    index = tl.sum(tiles, axis=0) - 1 - tl.program_id(1)
    if index < 0:
        return
    row = tl.sum((tl.cumsum(tiles, axis=0) <= index).to(tl.int32), axis=0)
    tile_id = index - tl.sum(tl.where(rows < row, tiles, 0), axis=0)

    kv_head = head // (H // KVH)
    query_start = tl.load(query_starts + row)
    query_len = tl.load(query_starts + row + 1) - query_start
    length = tl.load(context_lens + row)
    table = block_tables + row.to(tl.int64) * table_stride
    queries = tile_id * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    query_ok = (queries < query_len)[:, None] & (dims < D)[None, :]
    first_position = length - query_len + tile_id * BLOCK_M
    positions_q = first_position + tl.arange(0, BLOCK_M)
    at_q = (query_start + queries).to(tl.int64)
    q = tl.load(query + at_q[:, None] * query_stride + head * D + dims[None, :], mask=query_ok, other=0.0)
    if KV_FP8:
        q = as_multiplied(q)

    best = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_SINK:
        LOG2E: tl.constexpr = 1.4426950408889634
        best = tl.zeros([BLOCK_M], dtype=tl.float32) + LOG2E * tl.load(sink_logits + head).to(tl.float32)
        total = tl.full([BLOCK_M], 1.0, dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    stop = tl.minimum(first_position + BLOCK_M, length)
    begin = 0
    masked_from = (first_position + 1) // BLOCK_N * BLOCK_N  # every query sees all before it
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_N * BLOCK_N
        masked_from = begin
    for tile in range(begin, masked_from, BLOCK_N):
        acc, best, total = _context_tile(
            q, acc, best, total, tile, stop, positions_q, table, key_cache, value_cache, kv_head, scaling, softcap,
            window, KVH, D, BLOCK_D, BLOCK_N, BLOCK_TOKENS, False, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    for tile in range(masked_from, stop, BLOCK_N):
        acc, best, total = _context_tile(
            q, acc, best, total, tile, stop, positions_q, table, key_cache, value_cache, kv_head, scaling, softcap,
            window, KVH, D, BLOCK_D, BLOCK_N, BLOCK_TOKENS, True, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    out_at = out + (at_q * H + head)[:, None] * D + dims[None, :]
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=query_ok)
