"""Products of few rows with quantized weights on the matrix unit in FP8, in the Triton language.

A value of a row is the sum of two FP8 parts, which hold the eight digits of a bfloat16 number. FP8 weights are
multiplied as they lie; so are four-bit codes, since the byte c is the FP8 number c / 512: nothing is converted. Owns
the kernels only; `parts.py` launches them.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _four_digits(x):
    """The nearest number of four binary digits (Veltkamp): its conversion to FP8 rounds no more."""
    wide = x * 1048577.0
    return wide - (wide - x)


@triton.jit(do_not_specialize=["T"])
def split_kernel(
    x,  # [T, K]; HAS_ADD: added to the residual
    residual,  # HAS_NORM: [T, K]
    norm_weight,  # HAS_NORM: [K]
    order,  # HAS_ORDER: int32 [K]
    parts,  # FP8 [T, 2, K]: high and low
    row_scales,  # float32 [T], powers of two
    sums,  # HAS_SUMS: float32 [K / SPAN, T, 2]
    T,
    eps,
    K: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_ADD: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ORDER: tl.constexpr,
    HAS_SUMS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """(high + low / 16) * row_scales = [norm of (residual +=)] x, in the order of the weight's columns.

    The largest value of a row lies in the upper half of FP8's range. `sums`: of each part over each span.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)
    ok = columns < K
    place = columns
    if HAS_ORDER:
        place = tl.load(order + columns, mask=ok, other=0)
    if HAS_NORM:
        value = tl.load(residual + row * K + place, mask=ok, other=0.0)
        if HAS_ADD:
            value = (value.to(tl.float32) + tl.load(x + row * K + place, mask=ok, other=0.0)).to(value.dtype)
            tl.store(residual + row * K + place, value, mask=ok)
        wide = value.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, axis=0) / K + eps)
        wide = wide * factor * tl.load(norm_weight + place, mask=ok, other=0.0).to(tl.float32)
        wide = wide.to(value.dtype).to(tl.float32)
    else:
        wide = tl.load(x + row * K + place, mask=ok, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), axis=0) / 448.0
    power = ((largest.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(largest > 0.0, power, 1.0)
    near = wide / scale
    high = _four_digits(near).to(parts.dtype.element_ty)
    low = _four_digits((near - high.to(tl.float32)) * 16.0).to(parts.dtype.element_ty)
    tl.store(parts + row * 2 * K + columns, high, mask=ok)
    tl.store(parts + row * 2 * K + K + columns, low, mask=ok)
    tl.store(row_scales + row, scale)
    if HAS_SUMS:
        spans = tl.arange(0, BLOCK_K // SPAN)
        sums_at = sums + (spans.to(tl.int64) * T + row) * 2
        of_high = tl.sum(tl.reshape(tl.where(ok, high.to(tl.float32), 0.0), [BLOCK_K // SPAN, SPAN]), axis=1)
        of_low = tl.sum(tl.reshape(tl.where(ok, low.to(tl.float32), 0.0), [BLOCK_K // SPAN, SPAN]), axis=1)
        tl.store(sums_at, of_high, mask=spans < K // SPAN)
        tl.store(sums_at + 1, of_low, mask=spans < K // SPAN)


@triton.jit
def _codes(held, HALF: tl.constexpr, AT_ONCE: tl.constexpr):
    """The codes in one half of bytes, as FP8. AT_ONCE: four bytes by an instruction that the interpreter lacks."""
    if AT_ONCE:
        if HALF == 0:
            return tl.inline_asm_elementwise(
                "and.b32 $0, $1, 0x0f0f0f0f;", "=r,r", [held], dtype=tl.float8e4nv, is_pure=True, pack=4)  # fmt: skip
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shr.b32 t, $1, 4; and.b32 $0, t, 0x0f0f0f0f; }", "=r,r", [held], dtype=tl.float8e4nv,
            is_pure=True, pack=4)  # fmt: skip
    return ((held >> (4 * HALF)) & 15).to(tl.float8e4nv, bitcast=True)


@triton.jit
def _of_span(scales, zeros, sums, M, rows_at, lines, column_ok, line_ok, inner, K: tl.constexpr, GROUP: tl.constexpr,
             SPAN: tl.constexpr, CODES: tl.constexpr, HAS_ZEROS: tl.constexpr):  # fmt: skip
    """Of the span that begins at `inner`: scales and zero points [BLOCK_N], sums [2 * BLOCK_M]; behind K zeros."""
    more = inner < K
    scale = tl.load(scales + rows_at + inner // GROUP, mask=column_ok & more, other=0.0).to(tl.float32)
    zero = scale
    total = tl.zeros([1], dtype=tl.float32)
    if CODES:
        total = tl.load(sums + (inner // SPAN) * (2 * M) + lines, mask=line_ok & more, other=0.0)
        if HAS_ZEROS:
            zero = tl.load(zeros + rows_at + inner // GROUP, mask=column_ok & more, other=0).to(tl.float32)
    return scale, zero, total


@triton.jit
def _weighted(product, scale, zero, total, CODES: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """A span's product with its scale, codes less their zero points."""
    if CODES:
        if HAS_ZEROS:
            product = product * 512.0 - zero[:, None] * total[None, :]
        else:
            product = product * 512.0 - 8.0 * total[None, :]
    return product * scale[:, None]


@triton.jit(do_not_specialize=["M"])  # one binary for every batch size
def parts_kernel(
    parts,  # FP8 [M, 2, K]
    row_scales,  # float32 [M]
    sums,  # CODES: float32 [K / SPAN, M, 2]
    values,  # FP8 [N, K] or, with CODES, uint8 [N, K / 2]; GATED: [2 * N, ..], gate rows first
    scales,  # [N, G]; GATED: [2 * N, G]
    zeros,  # HAS_ZEROS: uint8 like `scales`
    bias,  # HAS_BIAS: [N]
    residual,  # HAS_RESIDUAL: [M, N], may be `out`
    out,  # [M, N]
    M,
    N,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CODES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """out = [residual +] [silu gate of] (x @ weight.T + bias) of x as `split_kernel` leaves it.

    The two parts of a row are neighbouring columns of a tile; they meet at the end. Scales and sums of a span are asked
    for one span ahead: nobody waits for them.
    """
    HALVES: tl.constexpr = 2 if CODES else 1
    BYTES: tl.constexpr = K // HALVES
    GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    BY_ROW: tl.constexpr = GROUP >= K and not CODES
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lines = tl.program_id(0) * 2 * BLOCK_M + tl.arange(0, 2 * BLOCK_M)
    lane = tl.arange(0, SPAN)
    column_ok = columns < N
    line_ok = lines < 2 * M
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    wide_columns = columns.to(tl.int64)
    values_at = values + (wide_columns * BYTES)[:, None] + lane[None, :]
    up_at = values_at + N.to(tl.int64) * BYTES
    parts_at = parts + lines.to(tl.int64)[None, :] * K + lane[:, None]
    rows_at = wide_columns * GROUPS
    up_rows_at = rows_at + N.to(tl.int64) * GROUPS
    acc = tl.zeros([BLOCK_N, 2 * BLOCK_M], dtype=tl.float32)
    acc_up = tl.zeros([BLOCK_N, 2 * BLOCK_M], dtype=tl.float32)
    if not BY_ROW:
        scale, zero, total = _of_span(
            scales, zeros, sums, M, rows_at, lines, column_ok, line_ok, 0, K, GROUP, SPAN, CODES,
            HAS_ZEROS)  # fmt: skip
        scale_up, zero_up = scale, zero
        if GATED:
            scale_up, zero_up, total = _of_span(
                scales, zeros, sums, M, up_rows_at, lines, column_ok, line_ok, 0, K, GROUP, SPAN, CODES,
                HAS_ZEROS)  # fmt: skip
    for start in range(0, BYTES, SPAN):
        if BYTES % SPAN == 0:
            weight_ok = column_ok[:, None]
            parts_ok = line_ok[None, :]
        else:
            lane_ok = start + lane < BYTES
            weight_ok = column_ok[:, None] & lane_ok[None, :]
            parts_ok = line_ok[None, :] & lane_ok[:, None]
        held = tl.load(values_at + start, mask=weight_ok, other=0.0)
        held_up = held
        if GATED:
            held_up = tl.load(up_at + start, mask=weight_ok, other=0.0)
        for half in tl.static_range(HALVES):
            first = start * HALVES + half * SPAN
            x = tl.load(parts_at + first, mask=parts_ok, other=0.0)
            weight = held
            up = held_up
            if CODES:
                weight = _codes(held, half, AT_ONCE)
                if GATED:
                    up = _codes(held_up, half, AT_ONCE)
            if BY_ROW:
                acc = tl.dot(weight, x, acc)
                if GATED:
                    acc_up = tl.dot(up, x, acc_up)
            else:
                this_scale, this_zero, this_total = scale, zero, total
                scale, zero, total = _of_span(
                    scales, zeros, sums, M, rows_at, lines, column_ok, line_ok, first + SPAN, K, GROUP, SPAN, CODES,
                    HAS_ZEROS)  # fmt: skip
                acc += _weighted(tl.dot(weight, x), this_scale, this_zero, this_total, CODES, HAS_ZEROS)
                if GATED:
                    this_scale, this_zero = scale_up, zero_up
                    scale_up, zero_up, total = _of_span(
                        scales, zeros, sums, M, up_rows_at, lines, column_ok, line_ok, first + SPAN, K, GROUP, SPAN,
                        CODES, HAS_ZEROS)  # fmt: skip
                    acc_up += _weighted(tl.dot(up, x), this_scale, this_zero, this_total, CODES, HAS_ZEROS)
    part_weight = tl.where(tl.arange(0, 2) == 0, 1.0, 0.0625)[None, None, :]
    result = tl.sum(tl.reshape(acc, [BLOCK_N, BLOCK_M, 2]) * part_weight, axis=2)
    result_up = tl.sum(tl.reshape(acc_up, [BLOCK_N, BLOCK_M, 2]) * part_weight, axis=2)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    row_ok = rows < M
    factor = tl.load(row_scales + rows, mask=row_ok, other=0.0)[None, :]
    result = result * factor
    result_up = result_up * factor
    if BY_ROW:
        result = result * tl.load(scales + columns, mask=column_ok, other=0.0).to(tl.float32)[:, None]
        if GATED:
            result_up = result_up * tl.load(scales + N + columns, mask=column_ok, other=0.0).to(tl.float32)[:, None]
    if HAS_BIAS:
        result += tl.load(bias + columns, mask=column_ok, other=0.0).to(tl.float32)[:, None]
    if GATED:
        result = result * tl.sigmoid(result) * result_up
    at = rows[None, :].to(tl.int64) * N + columns[:, None]
    mask = column_ok[:, None] & row_ok[None, :]
    if HAS_RESIDUAL:
        result += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=mask)
