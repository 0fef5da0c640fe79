"""Matrix products of few rows with quantized weights in the Triton language, with what surrounds them fused in.

Owns the kernels only; `quantized_rows.py` launches them. A weight lies as `quantized/packing.py` says and is turned
into numbers in registers: FP8 as one tile, four-bit codes as two, one from either half of the bytes. SPAN neighbours
along K have one scale, or, with GROUP equal to K, all have.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

from ...prefetch_kernels import fetch_lines


@triton.jit
def _fetch_bytes(values, rows, row_ok, ROW_BYTES: tl.constexpr, LINES: tl.constexpr):
    """The first LINES cache lines of rows of ROW_BYTES bytes."""
    starts = tl.minimum(tl.arange(0, LINES) * 128, ROW_BYTES - 1)
    fetch_lines(values + tl.where(row_ok, rows, 0).to(tl.int64)[:, None] * ROW_BYTES + starts[None, :])


@triton.jit
def _places(order, inner, inner_ok, HAS_ORDER: tl.constexpr):
    """Which inputs the weights at `inner` are for."""
    if HAS_ORDER:
        return tl.load(order + inner, mask=inner_ok, other=0)
    return inner


@triton.jit
def _group_values(by_group, row_at, inner, ok, GROUP: tl.constexpr):
    """Of `by_group` [N, G], what the groups of the inputs `inner` have."""
    return tl.load(by_group + row_at + inner // GROUP, mask=ok, other=0).to(tl.float32)


@triton.jit
def one_row_quantized_kernel(
    x,  # [1, K]
    norm_weight,  # HAS_NORM: [K]
    order,  # HAS_ORDER: int32 [K]
    values,  # FP8 [N, K] or, with CODES, uint8 [N, K / 2]; GATED: [2 * N, ..], gate rows first
    scales,  # [N, G]; GATED: [2 * N, G]
    zeros,  # HAS_ZEROS: uint8 like `scales`
    bias,  # HAS_BIAS: [N]
    residual,  # HAS_RESIDUAL: [1, N], may be `out`
    out,  # [1, N]
    N,
    norm_eps,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CODES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
    LINES_AHEAD: tl.constexpr,
):
    """out = [residual +] [silu gate of] (weight @ norm(x) + bias), without the matrix unit.

    A tile is [BLOCK_N, SPANS, SPAN]: a scale is loaded once for its span. The norm's weight goes to `x`, its 1 / rms
    to the result. With OVERLAP the first LINES_AHEAD cache lines of each row are on their way before the wait.
    """
    HALVES: tl.constexpr = 2 if CODES else 1
    STEP: tl.constexpr = SPANS * SPAN  # bytes of a row
    BYTES: tl.constexpr = K // HALVES
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_ok = columns < N
    if OVERLAP:
        if LINES_AHEAD > 0:
            _fetch_bytes(values, columns, column_ok, BYTES, LINES_AHEAD)
            if GATED:
                _fetch_bytes(values + N.to(tl.int64) * BYTES, columns, column_ok, BYTES, LINES_AHEAD)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    wide_columns = columns.to(tl.int64)
    span = tl.arange(0, SPANS)
    byte = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    values_at = values + (wide_columns * BYTES)[:, None, None] + byte[None, :, :]
    up_at = values_at + N.to(tl.int64) * BYTES
    groups_at = (wide_columns * GROUPS)[:, None]
    acc = tl.zeros([BLOCK_N, SPANS, SPAN], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_N, SPANS, SPAN], dtype=tl.float32)
    squares = tl.zeros([SPANS, SPAN], dtype=tl.float32)
    for start in range(0, BYTES, STEP):
        byte_ok = start + byte < BYTES
        span_ok = column_ok[:, None] & (start + span * SPAN < BYTES)[None, :]
        ok = column_ok[:, None, None] & byte_ok[None, :, :]
        held = tl.load(values_at + start, mask=ok, other=0.0, eviction_policy="evict_first")
        held_up = held
        if GATED:
            held_up = tl.load(up_at + start, mask=ok, other=0.0, eviction_policy="evict_first")
        for half in tl.static_range(HALVES):
            # Of the spans along K, a byte holds one in its low half and the next in its high half.
            first = (start + span * SPAN) * HALVES + half * SPAN
            inner = first[:, None] + tl.arange(0, SPAN)[None, :]
            place = _places(order, inner, byte_ok, HAS_ORDER)
            value = tl.load(x + place, mask=byte_ok, other=0.0).to(tl.float32)
            if HAS_NORM:
                squares += value * value
                value *= tl.load(norm_weight + place, mask=byte_ok, other=0.0).to(tl.float32)
            if CODES:
                weight = ((held >> (4 * half)) & 15).to(tl.float32)
                up = ((held_up >> (4 * half)) & 15).to(tl.float32)
                if HAS_ZEROS:
                    weight -= _group_values(zeros, groups_at, first[None, :], span_ok, GROUP)[:, :, None]
                    if GATED:
                        at = groups_at + N.to(tl.int64) * GROUPS
                        up -= _group_values(zeros, at, first[None, :], span_ok, GROUP)[:, :, None]
                else:
                    weight -= 8.0
                    up -= 8.0
            else:
                weight = held.to(tl.float32)
                up = held_up.to(tl.float32)
            product = weight * value[None, :, :]
            if GROUP < K:
                product *= _group_values(scales, groups_at, first[None, :], span_ok, GROUP)[:, :, None]
            acc += product
            if GATED:
                product = up * value[None, :, :]
                if GROUP < K:
                    at = groups_at + N.to(tl.int64) * GROUPS
                    product *= _group_values(scales, at, first[None, :], span_ok, GROUP)[:, :, None]
                acc_up += product
    result = tl.sum(tl.sum(acc, axis=2), axis=1)
    result_up = tl.sum(tl.sum(acc_up, axis=2), axis=1)
    factor = 1.0
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(tl.sum(squares, axis=1), axis=0) / K + norm_eps)
    result = result * factor
    result_up = result_up * factor
    if GROUP >= K:
        result *= tl.load(scales + columns, mask=column_ok, other=0.0).to(tl.float32)
        if GATED:
            result_up *= tl.load(scales + N + columns, mask=column_ok, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)
    if GATED:
        result = result * tl.sigmoid(result) * result_up
    if HAS_RESIDUAL:
        result += tl.load(residual + columns, mask=column_ok, other=0.0).to(tl.float32)
    tl.store(out + columns, result.to(out.dtype.element_ty), mask=column_ok)


@triton.jit(do_not_specialize=["M"])  # one binary for every batch size
def few_row_quantized_kernel(
    x,  # [M, K]
    norm_weight,  # HAS_NORM: [K]
    order,  # HAS_ORDER: int32 [K]
    values,  # FP8 [N, K] or, with CODES, uint8 [N, K / 2]; GATED: [2 * N, ..], gate rows first
    scales,  # [N, G]; GATED: [2 * N, G]
    zeros,  # HAS_ZEROS: uint8 like `scales`
    bias,  # HAS_BIAS: [N]
    residual,  # HAS_RESIDUAL: [M, N], may be `out`
    out,  # [M, N]
    M,
    N,
    norm_eps,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CODES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
    LINES_AHEAD: tl.constexpr,
):
    """out = [residual +] [silu gate of] (norm(x) @ weight.T + bias), on the matrix unit in the type of `x`.

    Codes less their zero points and FP8 values are exact in that type; a group's scale goes to the product of its
    span, in float32. Weights are the left operand: the matrix unit's large dimension lies along N.
    """
    HALVES: tl.constexpr = 2 if CODES else 1
    BYTES: tl.constexpr = K // HALVES
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, SPAN)
    column_ok = columns < N
    row_ok = rows < M
    if OVERLAP:
        if LINES_AHEAD > 0:
            _fetch_bytes(values, columns, column_ok, BYTES, LINES_AHEAD)
            if GATED:
                _fetch_bytes(values + N.to(tl.int64) * BYTES, columns, column_ok, BYTES, LINES_AHEAD)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    wide_columns = columns.to(tl.int64)
    values_at = values + (wide_columns * BYTES)[:, None] + lane[None, :]
    up_at = values_at + N.to(tl.int64) * BYTES
    groups_at = wide_columns * GROUPS
    up_groups_at = groups_at + N.to(tl.int64) * GROUPS
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    squares = tl.zeros([BLOCK_M], dtype=tl.float32)
    for start in range(0, BYTES, SPAN):
        lane_ok = lane < SPAN
        if BYTES % SPAN != 0:
            lane_ok = start + lane < BYTES
        ok = column_ok[:, None] & lane_ok[None, :]
        held = tl.load(values_at + start, mask=ok, other=0.0, eviction_policy="evict_first")
        held_up = held
        if GATED:
            held_up = tl.load(up_at + start, mask=ok, other=0.0, eviction_policy="evict_first")
        for half in tl.static_range(HALVES):
            first = start * HALVES + half * SPAN
            place = _places(order, first + lane, lane_ok, HAS_ORDER)
            x_at = x + rows.to(tl.int64)[None, :] * K + place[:, None]
            tile = tl.load(x_at, mask=row_ok[None, :] & lane_ok[:, None], other=0.0)
            if HAS_NORM:
                wide = tile.to(tl.float32)
                squares += tl.sum(wide * wide, axis=0)
                factors = tl.load(norm_weight + place, mask=lane_ok, other=0.0).to(tl.float32)
                tile = (wide * factors[:, None]).to(tile.dtype)
            if CODES:
                weight = ((held >> (4 * half)) & 15).to(tl.float32)
                up = ((held_up >> (4 * half)) & 15).to(tl.float32)
                if HAS_ZEROS:
                    weight -= _group_values(zeros, groups_at, first, column_ok, GROUP)[:, None]
                    if GATED:
                        up -= _group_values(zeros, up_groups_at, first, column_ok, GROUP)[:, None]
                else:
                    weight -= 8.0
                    up -= 8.0
            else:
                weight = held.to(tl.float32)
                up = held_up.to(tl.float32)
            if GROUP < K:
                product = tl.dot(weight.to(tile.dtype), tile, input_precision="ieee")
                acc += product * _group_values(scales, groups_at, first, column_ok, GROUP)[:, None]
                if GATED:
                    product = tl.dot(up.to(tile.dtype), tile, input_precision="ieee")
                    acc_up += product * _group_values(scales, up_groups_at, first, column_ok, GROUP)[:, None]
            else:
                acc = tl.dot(weight.to(tile.dtype), tile, acc, input_precision="ieee")
                if GATED:
                    acc_up = tl.dot(up.to(tile.dtype), tile, acc_up, input_precision="ieee")
    if GROUP >= K:
        acc *= tl.load(scales + columns, mask=column_ok, other=0.0).to(tl.float32)[:, None]
        if GATED:
            acc_up *= tl.load(scales + N + columns, mask=column_ok, other=0.0).to(tl.float32)[:, None]
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


@triton.jit
def unpack_kernel(
    values,  # FP8 [N, K] or, with CODES, uint8 [N, K / 2]
    scales,  # [N, G]
    zeros,  # HAS_ZEROS: uint8 [N, G]
    order,  # HAS_ORDER: int32 [K]
    out,  # [N, K]
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
    CODES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):
    """out = the weight in the type of `out`, inputs in their own order; a program has SPANS * SPAN bytes of a row."""
    HALVES: tl.constexpr = 2 if CODES else 1
    BYTES: tl.constexpr = K // HALVES
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1) * SPANS + tl.arange(0, SPANS)
    byte = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    ok = byte < BYTES
    held = tl.load(values + row * BYTES + byte, mask=ok, other=0.0)
    for half in tl.static_range(HALVES):
        first = span * SPAN * HALVES + half * SPAN
        inner = first[:, None] + tl.arange(0, SPAN)[None, :]
        span_ok = span * SPAN < BYTES
        if CODES:
            weight = ((held >> (4 * half)) & 15).to(tl.float32)
            if HAS_ZEROS:
                weight -= _group_values(zeros, row * GROUPS, first, span_ok, GROUP)[:, None]
            else:
                weight -= 8.0
        else:
            weight = held.to(tl.float32)
        weight *= _group_values(scales, row * GROUPS, first, span_ok, GROUP)[:, None]
        place = _places(order, inner, ok, HAS_ORDER)
        tl.store(out + row * K + place, weight.to(out.dtype.element_ty), mask=ok)
