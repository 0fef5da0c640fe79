"""Row-wise work around products of FP8 with FP8, one pass over memory each, in the Triton language.

What is multiplied becomes FP8 with a scale a row where it is made: behind a norm, behind the gate, or by itself. A
product without its scales gets them here, with bias, gate or residual. Owns the kernels only; arithmetic is float32.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _store_row(wide, out, scale_out, static_scale, row, columns, ok, K: tl.constexpr, STATIC: tl.constexpr):
    """A row as FP8 and the scale that undoes it: with STATIC the one given, what lies beyond is cut; else the row's
    largest value lies at the end of the range, and zeros get the scale 1."""
    if STATIC:
        scale = static_scale
    else:
        largest = tl.max(tl.abs(wide), axis=0)
        scale = tl.where(largest > 0.0, largest / 448.0, 1.0)
    near = tl.minimum(tl.maximum(wide / scale, -448.0), 448.0)
    tl.store(out + row * K + columns, near.to(out.dtype.element_ty), mask=ok)
    tl.store(scale_out + row, scale)


@triton.jit
def add_norm_fp8_kernel(
    x,  # [T, K]
    residual,  # [T, K], becomes residual + x when HAS_ADD
    weight,  # [K]
    out,  # FP8 [T, K]
    scale_out,  # float32 [T]
    static_scale,  # STATIC
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_ADD: tl.constexpr,
    STATIC: tl.constexpr,
):
    """residual += x; out * scale_out = rms_norm(residual) * weight."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    ok = columns < K
    value = tl.load(residual + row * K + columns, mask=ok, other=0.0)
    if HAS_ADD:
        value = (value.to(tl.float32) + tl.load(x + row * K + columns, mask=ok, other=0.0)).to(value.dtype)
        tl.store(residual + row * K + columns, value, mask=ok)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / K + eps)
    normed = wide * factor * tl.load(weight + columns, mask=ok, other=0.0).to(tl.float32)
    _store_row(normed, out, scale_out, static_scale, row, columns, ok, K, STATIC)


@triton.jit
def rows_fp8_kernel(x, out, scale_out, static_scale, K: tl.constexpr, BLOCK_K: tl.constexpr, STATIC: tl.constexpr):
    """out [T, K] * scale_out [T] = x [T, K]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    ok = columns < K
    wide = tl.load(x + row * K + columns, mask=ok, other=0.0).to(tl.float32)
    _store_row(wide, out, scale_out, static_scale, row, columns, ok, K, STATIC)


@triton.jit
def gate_fp8_kernel(
    gate_up,  # [T, 2 * N], gate first
    row_scales,  # HAS_SCALES: float32 [T]
    column_scales,  # HAS_SCALES: [2 * N]
    out,  # [T, N], FP8 with TO_FP8
    scale_out,  # TO_FP8: float32 [T]
    static_scale,  # STATIC
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    TO_FP8: tl.constexpr,
    STATIC: tl.constexpr,
):
    """out [* scale_out] = silu(gate) * up, a whole row a program; with HAS_SCALES `gate_up` lacks its scales."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_N)
    ok = columns < N
    gate = tl.load(gate_up + row * 2 * N + columns, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + columns, mask=ok, other=0.0).to(tl.float32)
    if HAS_SCALES:
        scale = tl.load(row_scales + row)
        gate *= scale * tl.load(column_scales + columns, mask=ok, other=0.0).to(tl.float32)
        up *= scale * tl.load(column_scales + N + columns, mask=ok, other=0.0).to(tl.float32)
    wide = gate * tl.sigmoid(gate) * up
    if TO_FP8:
        _store_row(wide, out, scale_out, static_scale, row, columns, ok, N, STATIC)
    else:
        tl.store(out + row * N + columns, wide.to(out.dtype.element_ty), mask=ok)


@triton.jit
def scale_kernel(
    product,  # [T, N], without its scales
    row_scales,  # float32 [T]
    column_scales,  # [N]
    bias,  # HAS_BIAS: [N]
    out,  # [T, N]; HAS_RESIDUAL: the residual, added to
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """out = [out +] product * row_scales * column_scales [+ bias]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = columns < N
    wide = tl.load(product + row * N + columns, mask=ok, other=0.0).to(tl.float32) * tl.load(row_scales + row)
    wide *= tl.load(column_scales + columns, mask=ok, other=0.0).to(tl.float32)
    if HAS_BIAS:
        wide += tl.load(bias + columns, mask=ok, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        wide += tl.load(out + row * N + columns, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * N + columns, wide.to(out.dtype.element_ty), mask=ok)
