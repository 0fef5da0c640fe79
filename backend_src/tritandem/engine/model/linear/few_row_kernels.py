"""Matrix products of few rows (decode) in the Triton language, with what surrounds them fused in.

Owns the kernels only; `linear_cuda.py` decides where they are used. Weights are [N, K] as `nn.Linear` keeps
them. Bound by reading the weights once, or for small ones by the latency of a launch.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ...prefetch_kernels import fetch_rows


@triton.jit
def one_row_kernel(
    x,  # [1, K]
    weight,  # [N, K]; GATED: [2 * N, K], gate rows first
    bias,  # HAS_BIAS: [N]
    residual,  # HAS_RESIDUAL: [1, N], may be `out`
    out,  # [1, N]
    N,
    norm_eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
    LINES_AHEAD: tl.constexpr,
):
    """out = [residual +] [silu gate of] (weight @ (x / rms(x)) + bias), without the matrix unit.

    With OVERLAP the weights of one tile a program, or LINES_AHEAD cache lines of each row of more, are on their way
    before the kernel waits for the one that makes `x`.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    column_ok = columns < N
    at = weight + columns.to(tl.int64)[:, None] * K + inner[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    squares = tl.zeros([BLOCK_K], dtype=tl.float32)
    if K <= BLOCK_K:
        ok = column_ok[:, None] & (inner < K)[None, :]
        w = tl.load(at, mask=ok, other=0.0, eviction_policy="evict_first").to(tl.float32)
        up = w
        if GATED:
            up = tl.load(at + N * K, mask=ok, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        value = tl.load(x + inner, mask=inner < K, other=0.0).to(tl.float32)
        acc = w * value[None, :]
        acc_up = up * value[None, :]
        squares = value * value
    else:
        if OVERLAP:
            if LINES_AHEAD > 0:
                fetch_rows(weight, columns, column_ok, K, LINES_AHEAD)
                if GATED:
                    fetch_rows(weight + N * K, columns, column_ok, K, LINES_AHEAD)
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        for start in range(0, K, BLOCK_K):
            ok = column_ok[:, None]
            value_ok = inner < BLOCK_K
            if K % BLOCK_K != 0:
                value_ok = inner < K - start
                ok = ok & value_ok[None, :]
            w = tl.load(at + start, mask=ok, other=0.0, eviction_policy="evict_first").to(tl.float32)
            value = tl.load(x + start + inner, mask=value_ok, other=0.0).to(tl.float32)
            acc += w * value[None, :]
            if GATED:
                up = tl.load(at + start + N * K, mask=ok, other=0.0, eviction_policy="evict_first")
                acc_up += up.to(tl.float32) * value[None, :]
            if HAS_NORM:
                squares += value * value
    result = tl.sum(acc, axis=1)
    factor = 1.0
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + norm_eps)
    result = result * factor
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)
    if GATED:
        result = result * tl.sigmoid(result) * (tl.sum(acc_up, axis=1) * factor)
    if HAS_RESIDUAL:
        result += tl.load(residual + columns, mask=column_ok, other=0.0).to(tl.float32)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=column_ok)


@triton.jit(do_not_specialize=["M"])  # one binary for every batch size
def few_row_kernel(
    x,  # [M, K]
    weight,  # [N, K]; GATED: [2 * N, K], gate rows first
    bias,  # HAS_BIAS: [N]
    residual,  # HAS_RESIDUAL: [M, N], may be `out`
    out,  # [M, N]
    M,
    N,
    norm_eps,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
    LINES_AHEAD: tl.constexpr,
):
    """out = [residual +] [silu gate of] ((x / rms(x)) @ weight.T + bias).

    1 / rms is one factor a row and is applied after the product, so that tiles of `x` go to the matrix unit
    untouched. Its squares are summed beforehand, NORM_K elements at a time, or with NORM_K 0 from the product's
    own tiles. Weights are the left operand: the matrix unit's large dimension lies along N. With OVERLAP the first
    LINES_AHEAD cache lines of each of their rows are on their way before the kernel waits.
    """
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    inner = tl.arange(0, BLOCK_K)
    column_ok = columns < N
    row_ok = rows < M
    if OVERLAP:
        if LINES_AHEAD > 0:
            fetch_rows(weight, columns, column_ok, K, LINES_AHEAD)
            if GATED:
                fetch_rows(weight + N * K, columns, column_ok, K, LINES_AHEAD)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    if HAS_NORM and NORM_K > 0:
        for start in tl.static_range(0, K, NORM_K):
            part = start + tl.arange(0, NORM_K)
            part_ok = row_ok[:, None] & (part < K)[None, :]
            value = tl.load(x + rows[:, None] * K + part[None, :], mask=part_ok, other=0.0).to(tl.float32)
            squares += tl.sum(value * value, axis=1)
    weight_at = weight + columns.to(tl.int64)[:, None] * K + inner[None, :]
    x_at = x + rows[None, :] * K + inner[:, None]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
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
        acc = tl.dot(w, tile, acc, input_precision="ieee")
        if HAS_NORM and NORM_K == 0:
            wide = tile.to(tl.float32)
            squares += tl.sum(wide * wide, axis=0)
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
