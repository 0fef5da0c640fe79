"""Row-wise work around the products, one pass over memory each, in the Triton language: norm and gate.

Owns the kernels only; `rowwise.py` launches them. All arithmetic is float32.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_norm_kernel(
    x,  # [T, K]
    residual,  # [T, K], becomes residual + x when HAS_ADD
    weight,  # [K]
    out,  # [T, K]
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """residual += x; out = rms_norm(residual) * weight. Without HAS_ADD the residual alone is normed."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    ok = columns < K
    value = tl.load(residual + row * K + columns, mask=ok, other=0.0)
    if HAS_ADD:
        value = (value.to(tl.float32) + tl.load(x + row * K + columns, mask=ok, other=0.0)).to(value.dtype)
        tl.store(residual + row * K + columns, value, mask=ok)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / K + eps)
    scale = tl.load(weight + columns, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * K + columns, (wide * factor * scale).to(out.dtype.element_ty), mask=ok)


@triton.jit
def silu_mul_kernel(gate_up, out, N: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr):
    """out[t, n] = silu(gate_up[t, n]) * gate_up[t, N + n]."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    ok = columns < N
    gate = tl.load(gate_up + row * 2 * N + columns, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * N + N + columns, mask=ok, other=0.0).to(tl.float32)
    tl.store(out + row * N + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=ok)
