"""A quantized weight to numbers in memory, in the Triton language.

Owns the kernel only; `unpacked.py` launches it. A weight lies as `quantized/packing.py` says: FP8 as one tile, four-bit
codes as two, one from either half of the bytes.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803, N806
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl


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
