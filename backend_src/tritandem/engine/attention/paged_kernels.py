"""Paged attention in the Triton language: decode with split context.

Owns the kernel only; sizes and launches are in `paged_cuda.py`. Imported on CUDA machines alone (needs
`triton`). The online softmax follows Dao et al., "FlashAttention-2" (2023); the split over the context with
a reduction by the last block to arrive follows "Flash-Decoding" (2023) and the usual counter scheme.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803, N806, SIM102
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ..prefetch_kernels import fetch_lines
from .store_kernels import as_cached


@triton.jit
def capped(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """cap * tanh(scores / cap), written with the sigmoid that every back end has."""
    if HAS_SOFTCAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores


@triton.jit
def as_multiplied(q):
    """The type in which FP8 keys and values are multiplied: converted to float16 they cost half of what they do to
    bfloat16, and are exact in both. Wider queries stay as they are."""
    if q.dtype == tl.bfloat16:
        q = q.to(tl.float16)
    return q


@triton.jit
def _rotated(base, dims, cos, sin, ok, norm_weight, norm_eps, D: tl.constexpr, HAS_NORM: tl.constexpr):
    """Rows of D values at `base` [R, 1] after an optional RMS norm and the half-split rotary embedding."""
    half: tl.constexpr = D // 2
    partner = tl.where(dims < half, dims + half, dims - half)
    x = tl.load(base + dims[None, :], mask=ok, other=0.0).to(tl.float32)
    y = tl.load(base + partner[None, :], mask=ok, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + norm_eps)[:, None]
        x = x * scale * tl.load(norm_weight + dims, mask=dims < D, other=0.0).to(tl.float32)[None, :]
        y = y * scale * tl.load(norm_weight + partner, mask=dims < D, other=0.0).to(tl.float32)[None, :]
    sign = tl.where(dims < half, -1.0, 1.0)
    return x * cos[None, :] + sign[None, :] * y * sin[None, :]


@triton.jit
def decode_kernel(
    query,  # [S, query_stride]: H heads of D; with FUSED also KVH heads of K and of V behind them, unrotated
    cos_table,  # FUSED: float32 [max_positions, D]
    sin_table,
    query_norm,  # HAS_NORM: [D]
    key_norm,
    key_cache,  # [num_blocks, BLOCK_TOKENS, KVH, D]
    value_cache,
    block_tables,  # int32 [S, table_stride]
    table_rows,  # FUSED: int32 [S] row of each sequence in block_tables
    context_lens,  # int32 [S]
    sink_logits,  # HAS_SINK: [H]
    out,  # [S, H, D]
    partial_acc,  # float32 [S, KVH, SPLITS, GROUP, BLOCK_D]
    partial_max,  # float32 [S, KVH, SPLITS, GROUP], in units of log2
    partial_sum,
    arrivals,  # int32 [S, KVH], zero before and after each launch
    scaling,
    softcap,
    norm_eps,
    query_stride,
    table_stride,
    window,
    H: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    FUSED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINK: tl.constexpr,
    OVERLAP: tl.constexpr,
    TOKENS_AHEAD: tl.constexpr,
    KV_FP8: tl.constexpr,
    HEADS_FIRST: tl.constexpr,
    LEAST_TILES: tl.constexpr,
):
    """One program: one sequence, one KV head (all its query heads), one part of the context.

    FUSED: rotates Q and K of the new token, stores its K and V, and attends over cache + new token. With OVERLAP, K
    and V of the first TOKENS_AHEAD positions of the part are on their way before the kernel waits for the one that
    makes `query`: lengths, tables and cache were written before that one began.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    GROUP: tl.constexpr = H // KVH
    row = tl.program_id(1 if HEADS_FIRST else 0)
    kv_head = tl.program_id(0 if HEADS_FIRST else 1)
    split = tl.program_id(2)
    length = tl.load(context_lens + row)
    heads = tl.arange(0, GROUP_PAD)
    dims = tl.arange(0, BLOCK_D)
    query_ok = (heads < GROUP)[:, None] & (dims < D)[None, :]
    out_at = out + (row * H + kv_head * GROUP + heads)[:, None] * D + dims[None, :]
    past = length
    if FUSED:
        past = length - 1
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0) // BLOCK_N * BLOCK_N
    tiles = tl.cdiv(past - first, BLOCK_N)
    tiles_here = tl.maximum(tl.cdiv(tiles, SPLITS), LEAST_TILES)
    parts = tl.maximum(tl.cdiv(tiles, tiles_here), 1)
    start = first + split * tiles_here * BLOCK_N
    stop = tl.minimum(start + tiles_here * BLOCK_N, past)
    table = block_tables + row.to(tl.int64) * table_stride
    if FUSED:
        table = block_tables + tl.load(table_rows + row).to(tl.int64) * table_stride
    if OVERLAP:
        if TOKENS_AHEAD > 0:
            if start < stop:
                ahead = tl.minimum(start + tl.arange(0, TOKENS_AHEAD), stop - 1)
                blocks_ahead = tl.load(table + ahead // BLOCK_TOKENS).to(tl.int64)
                at_ahead = ((blocks_ahead * BLOCK_TOKENS + ahead % BLOCK_TOKENS) * KVH + kv_head) * D
                for line in tl.static_range(0, D, 128 if KV_FP8 else 64):  # elements of one byte or two
                    fetch_lines(key_cache + at_ahead + line)
                    fetch_lines(value_cache + at_ahead + line)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if length == 0:
        if split == 0:
            tl.store(out_at, tl.zeros([GROUP_PAD, BLOCK_D], dtype=out.dtype.element_ty), mask=query_ok)
        return
    if split >= parts:
        return

    if FUSED:
        cos = tl.load(cos_table + past * D + dims, mask=dims < D, other=0.0)
        sin = tl.load(sin_table + past * D + dims, mask=dims < D, other=0.0)
        q_at = query + row * query_stride + (kv_head * GROUP + heads)[:, None] * D
        q = _rotated(q_at, dims, cos, sin, query_ok, query_norm, norm_eps, D, HAS_NORM).to(query.dtype.element_ty)
    else:
        q_at = query + row * query_stride + (kv_head * GROUP + heads)[:, None] * D + dims[None, :]
        q = tl.load(q_at, mask=query_ok, other=0.0)
    if KV_FP8:
        q = as_multiplied(q)

    best = tl.full([GROUP_PAD], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP_PAD], dtype=tl.float32)
    acc = tl.zeros([GROUP_PAD, BLOCK_D], dtype=tl.float32)
    if HAS_SINK:
        if split == 0:  # every row has this part, so the sink is counted once
            best = LOG2E * tl.load(sink_logits + kv_head * GROUP + heads, mask=heads < GROUP, other=0.0).to(tl.float32)
            total = tl.full([GROUP_PAD], 1.0, dtype=tl.float32)
    for tile in range(start, stop, BLOCK_N):
        positions = tile + tl.arange(0, BLOCK_N)
        live = positions < stop
        seen = live
        if HAS_WINDOW:  # before the window may lie blocks that belong to others by now
            seen = live & (positions >= length - window)
        blocks = tl.load(table + positions // BLOCK_TOKENS, mask=live, other=0).to(tl.int64)
        at = ((blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS) * KVH + kv_head) * D
        k = tl.load(key_cache + at[None, :] + dims[:, None], mask=seen[None, :] & (dims < D)[:, None], other=0.0)
        v = tl.load(value_cache + at[:, None] + dims[None, :], mask=seen[:, None] & (dims < D)[None, :], other=0.0)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        scores = capped(tl.dot(q, k, input_precision="ieee") * scaling, softcap, HAS_SOFTCAP) * LOG2E
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # A tile can lie before the window for every head: keep exp2 away from (-inf) - (-inf).
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        shift = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(best - shift)
        total = total * decay + tl.sum(weights, axis=1)
        acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        best = new_best

    if FUSED:
        if split == parts - 1:
            ones = tl.arange(0, 1)[:, None]
            new_ok = (ones < 1) & (dims < D)[None, :]
            k_at = query + row * query_stride + (H + kv_head) * D + ones
            k_new = _rotated(k_at, dims, cos, sin, new_ok, key_norm, norm_eps, D, HAS_NORM)
            k_new = as_cached(k_new.to(query.dtype.element_ty), KV_FP8).to(key_cache.dtype.element_ty)
            v_new = tl.load(
                query + row * query_stride + (H + KVH + kv_head) * D + dims[None, :], mask=new_ok, other=0.0
            )
            block = tl.load(table + past // BLOCK_TOKENS).to(tl.int64)
            at_new = ((block * BLOCK_TOKENS + past % BLOCK_TOKENS) * KVH + kv_head) * D + dims[None, :]
            v_new = as_cached(v_new, KV_FP8).to(value_cache.dtype.element_ty)
            tl.store(key_cache + at_new, k_new, mask=new_ok)
            tl.store(value_cache + at_new, v_new, mask=new_ok)
            score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32), axis=1) * scaling
            score = capped(score, softcap, HAS_SOFTCAP) * LOG2E
            new_best = tl.maximum(best, score)
            decay = tl.exp2(best - new_best)
            weight = tl.exp2(score - new_best)
            total = total * decay + weight
            acc = acc * decay[:, None] + weight[:, None] * v_new.to(tl.float32)
            best = new_best

    if SPLITS > 1:
        if parts > 1:
            entry = (row * KVH + kv_head) * SPLITS
            mine = (entry + split) * GROUP + heads
            head_ok = heads < GROUP
            tl.store(partial_max + mine, best, mask=head_ok)
            tl.store(partial_sum + mine, total, mask=head_ok)
            tl.store(partial_acc + mine[:, None] * BLOCK_D + dims[None, :], acc, mask=head_ok[:, None])
            # Every thread's stores happen before the counter goes up; the last block to arrive reads past L1.
            tl.debug_barrier()
            arrived = tl.atomic_add(arrivals + row * KVH + kv_head, 1, sem="acq_rel")
            if arrived != parts - 1:
                return
            tl.debug_barrier()
            tl.store(arrivals + row * KVH + kv_head, 0)
            # All parts are loaded at once: a loop over them would pay the memory's latency for each.
            few = tl.arange(0, GROUP_ROWS)
            all_parts = tl.arange(0, SPLITS)
            part_ok = (all_parts < parts)[:, None] & (few < GROUP)[None, :]
            theirs = (entry + all_parts)[:, None] * GROUP + few[None, :]
            their_best = tl.load(partial_max + theirs, mask=part_ok, other=float("-inf"), cache_modifier=".cg")
            their_total = tl.load(partial_sum + theirs, mask=part_ok, other=0.0, cache_modifier=".cg")
            overall = tl.max(their_best, axis=0)
            weight = tl.exp2(their_best - tl.where(overall == float("-inf"), 0.0, overall)[None, :])
            total_here = tl.sum(weight * their_total, axis=0)
            their_acc = tl.load(
                partial_acc + theirs[:, :, None] * BLOCK_D + dims[None, None, :],
                mask=part_ok[:, :, None],
                other=0.0,
                cache_modifier=".cg",
            )
            merged = tl.sum(their_acc * weight[:, :, None], axis=0) / total_here[:, None]
            merged_at = out + (row * H + kv_head * GROUP + few)[:, None] * D + dims[None, :]
            merged_ok = (few < GROUP)[:, None] & (dims < D)[None, :]
            tl.store(merged_at, merged.to(out.dtype.element_ty), mask=merged_ok)
            return
    tl.store(out_at, (acc / total[:, None]).to(out.dtype.element_ty), mask=query_ok)
