"""K and V into the cache, rotated on the way or as they are, in the Triton language.

Owns the kernels only; `paged.py` launches them. All arithmetic is float32.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def as_cached(x, KV_FP8: tl.constexpr):
    """What the cache is given of x: FP8 is cut to its range, and NaN stays NaN; a store converts the rest."""
    if KV_FP8:
        x = x.to(tl.float32)
        x = tl.maximum(x, -448.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.minimum(x, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    return x


@triton.jit
def rotate_store_kernel(
    qkv,  # [T, (H + 2 * KVH) * D]; the first H heads are rotated in place
    cos_table,  # float32 [max_positions, D]
    sin_table,
    positions,  # int64 [T]
    slot_mapping,  # int64 [T]
    query_norm,  # HAS_NORM: [D]
    key_norm,
    key_cache,  # [num_blocks * block_tokens, KVH, D]
    value_cache,
    norm_eps,
    H: tl.constexpr,
    KVH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_NORM: tl.constexpr,
    KV_FP8: tl.constexpr,
):
    """Rotate Q in place, rotate K into the cache, copy V into the cache. One program a token."""
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    partner = tl.where(dims < half, dims + half, dims - half)
    sign = tl.where(dims < half, -1.0, 1.0)
    at = qkv + token * ((H + 2 * KVH) * D) + heads * D
    turned = (heads < H + KVH) & (dims < D)
    position = tl.load(positions + token)
    cos = tl.load(cos_table + position * D + dims, mask=dims < D, other=0.0)
    sin = tl.load(sin_table + position * D + dims, mask=dims < D, other=0.0)
    x = tl.load(at + dims, mask=turned, other=0.0).to(tl.float32)
    y = tl.load(at + partner, mask=turned, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + norm_eps)[:, None]
        x *= scale * tl.where(
            heads < H,
            tl.load(query_norm + dims, mask=dims < D, other=0.0).to(tl.float32),
            tl.load(key_norm + dims, mask=dims < D, other=0.0).to(tl.float32),
        )
        y *= scale * tl.where(
            heads < H,
            tl.load(query_norm + partner, mask=dims < D, other=0.0).to(tl.float32),
            tl.load(key_norm + partner, mask=dims < D, other=0.0).to(tl.float32),
        )
    turned_value = (x * cos + sign * y * sin).to(qkv.dtype.element_ty)
    # Both halves of a head are read before either is written: they are one program's registers.
    tl.debug_barrier()
    tl.store(at + dims, turned_value, mask=(heads < H) & (dims < D))
    slot = tl.load(slot_mapping + token)
    cache_at = slot * (KVH * D) + (heads - H) * D + dims
    tl.store(key_cache + cache_at, as_cached(turned_value, KV_FP8), mask=(heads >= H) & turned)
    value_heads = tl.arange(0, BLOCK_H)[:, None]
    value_ok = (value_heads < KVH) & (dims < D)
    value = tl.load(qkv + token * ((H + 2 * KVH) * D) + (H + KVH + value_heads) * D + dims, mask=value_ok, other=0.0)
    tl.store(value_cache + slot * (KVH * D) + value_heads * D + dims, as_cached(value, KV_FP8), mask=value_ok)


@triton.jit
def store_kernel(
    key,  # [T, KVH, D] by strides
    value,
    slot_mapping,  # int64 [T]
    key_cache,
    value_cache,
    key_stride_t,
    key_stride_h,
    value_stride_t,
    value_stride_h,
    KVH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KV_FP8: tl.constexpr,
):
    """Copy K and V of one token into the cache at its slot."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_H)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    ok = (heads < KVH) & (dims < D)
    slot = tl.load(slot_mapping + token)
    at = slot * (KVH * D) + heads * D + dims
    k = tl.load(key + token * key_stride_t + heads * key_stride_h + dims, mask=ok, other=0.0)
    v = tl.load(value + token * value_stride_t + heads * value_stride_h + dims, mask=ok, other=0.0)
    tl.store(key_cache + at, as_cached(k, KV_FP8), mask=ok)
    tl.store(value_cache + at, as_cached(v, KV_FP8), mask=ok)
