"""Matrix products of few rows (decode) in the Triton language, with what surrounds them fused in.

Owns the kernel only; `fused_cuda.py` decides where it is used. Weights are [N, K] as `nn.Linear` keeps them.
Bound by reading the weights once: a program streams BLOCK_N rows of them and all M rows of the input.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def linear_kernel(
    x,  # [M, K]
    weight,  # [N, K]; GATED: [2 * N, K], gate rows first
    bias,  # HAS_BIAS: [N]
    residual,  # HAS_RESIDUAL: [M, N], may be `out`
    norm_weight,  # HAS_NORM: [K]
    out,  # [M, N]
    M,
    N,
    norm_eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """out = [residual +] [silu gate of] (rms_norm(x) @ weight.T + bias).

    The norm costs no pass of its own: the row's factor 1/rms is a scalar that is applied after the product,
    its sum of squares is gathered while the row streams by. Weights are the left operand so that the matrix
    unit's large dimension lies along N.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    column_ok = columns < N
    row_ok = rows < M
    weight_at = weight + columns.to(tl.int64)[:, None] * K + inner[None, :]
    x_at = x + rows[None, :] * K + inner[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            weight_mask = column_ok[:, None]
            x_mask = row_ok[None, :]
        else:
            inner_ok = inner < K - start
            weight_mask = column_ok[:, None] & inner_ok[None, :]
            x_mask = row_ok[None, :] & inner_ok[:, None]
        w = tl.load(weight_at + start, mask=weight_mask, other=0.0, eviction_policy="evict_first")
        tile = tl.load(x_at + start, mask=x_mask, other=0.0)
        if HAS_NORM:
            wide = tile.to(tl.float32)
            squares += tl.sum(wide * wide, axis=0)
            scale = tl.load(norm_weight + start + inner, mask=inner < K - start, other=0.0).to(tl.float32)
            tile = (wide * scale[:, None]).to(tile.dtype)
        acc = tl.dot(w, tile, acc, input_precision="ieee")
        if GATED:
            up = tl.load(weight_at + start + N * K, mask=weight_mask, other=0.0, eviction_policy="evict_first")
            acc_up = tl.dot(up, tile, acc_up, input_precision="ieee")
    if HAS_NORM:
        factor = tl.rsqrt(squares / K + norm_eps)[None, :]
        acc = acc * factor
        acc_up = acc_up * factor
    if HAS_BIAS:
        acc += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)[:, None]
    if GATED:
        acc = acc * tl.sigmoid(acc) * acc_up
    at = rows[None, :].to(tl.int64) * N + columns[:, None]
    mask = column_ok[:, None] & row_ok[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
