"""What a kernel fetches into the L2 cache while it still waits for the one before it, in the Triton language.

For launches that overlap (programmatic dependent launch): weights and cached K and V do not depend on the
predecessor, so their way from memory can be over when the wait is. Holds no policy; device code only.
"""

# Constants of a kernel are written in capitals; `triton.jit` functions are not Python to a type checker.
# ruff: noqa: N803
# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call,no-any-return"

from __future__ import annotations

import triton
import triton.language as tl

LINE_BYTES = 128


@triton.jit
def fetch_lines(pointers):
    """Ask for the cache lines that hold the elements at `pointers`; all must be valid addresses."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def fetch_rows(weight, columns, column_ok, K: tl.constexpr, LINES: tl.constexpr):
    """The first LINES cache lines of the rows `columns` of `weight` [N, K], elements of two bytes."""
    starts = tl.minimum(tl.arange(0, LINES) * 64, K - 1)
    rows = tl.where(column_ok, columns, 0).to(tl.int64)
    fetch_lines(weight + rows[:, None] * K + starts[None, :])
