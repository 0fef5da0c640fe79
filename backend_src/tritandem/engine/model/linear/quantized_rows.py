"""Products of few rows with quantized weights: how they are cut, and their launches.

Knows nothing about models; launches on the current stream without host synchronisation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from triton import next_power_of_2

from ...prefetch_kernels import LINE_BYTES
from ..quantized.packing import PackedWeight
from .few_rows import LinearTiles
from .interface import Norm
from .quantized_kernels import few_row_quantized_kernel, one_row_quantized_kernel, unpack_kernel

_ROW_BYTES = 512  # of weights in one tile of the one-row kernel, a row
_LINES_AHEAD = 32
_SMALL_BYTES = 16 << 20  # larger weights keep the memory busy by themselves
MOST_ROWS = 128  # beyond, unpacking the weight once is cheaper than unpacking it for every tile of rows


def choose_quantized_tiles(rows: int, columns: int, inner: int, codes: bool, gated: bool = False) -> LinearTiles | None:
    """Tiles for our kernels, or None for more than `MOST_ROWS` rows. Pure; `block_k` is in bytes of a weight's row.

    One row was swept on an H200 (gate and up of an 8B model: 46 us in FP8, 51 in codes). More were not: they go to the
    matrix unit, with columns enough for its large
    dimension, but fewer where those would make fewer programs than a device has multiprocessors. Wider tiles spill
    registers when compiled for compute capability 9.0.
    """
    if rows == 1:
        return LinearTiles(1, 8, min(_ROW_BYTES, next_power_of_2(inner // 2 if codes else inner)), 4, 1)
    if rows > MOST_ROWS:
        return None
    block_m = min(32 if codes and gated else 64, max(16, next_power_of_2(rows)))
    block_n = 64
    if columns <= 2048 and rows <= 16:
        block_n = 16
    elif columns <= 8192 and rows <= 32 and not gated:
        block_n = 32
    warps = 8 if block_n == 64 and (codes or block_m > 32) else 4
    return LinearTiles(block_m, block_n, 0, warps, 4 if block_m == 16 else 3)


def quantized_linear(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    norm: Norm | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    overlap: bool = False,
) -> torch.Tensor:
    """[residual +] norm(x) @ weight.T + bias, or silu(gate) * up of it; all contiguous.

    `x` [M, K], M at most `MOST_ROWS`; `weight` [N, K], with `gated` [2 * N, K] (gate rows first); returns [M, N].
    With `residual` [M, N] the sum is written into it and it is returned. With `overlap` the kernel may start while the
    one before it ends (it waits before it reads `x`).
    """
    rows, inner = x.shape
    columns = weight.rows // 2 if gated else weight.rows
    codes = not weight.is_fp8
    tiles = choose_quantized_tiles(rows, columns, inner, codes, gated)
    assert tiles is not None
    out = residual if residual is not None else torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    column_tiles = (columns + tiles.block_n - 1) // tiles.block_n
    options = {
        "K": inner,
        "GROUP": weight.group,
        "SPAN": weight.span,
        "BLOCK_N": tiles.block_n,
        "CODES": codes,
        "HAS_ZEROS": weight.zeros is not None,
        "HAS_ORDER": weight.order is not None,
        "HAS_NORM": norm is not None,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "GATED": gated,
        "OVERLAP": overlap,
        "LINES_AHEAD": _lines_ahead(weight),
        "launch_pdl": overlap,
        "num_warps": tiles.warps,
    }
    pointers = (
        x,
        norm.weight if norm is not None else x,
        weight.order if weight.order is not None else x,
        weight.values,
        weight.scales,
        weight.zeros if weight.zeros is not None else weight.scales,
        bias if bias is not None else x,
        out,
        out,
    )
    eps = norm.eps if norm is not None else 0.0
    if tiles.block_m == 1:
        spans = max(1, tiles.block_k // weight.span)
        one_row_quantized_kernel[(column_tiles,)](*pointers, columns, eps, SPANS=spans, **options)
        return out
    few_row_quantized_kernel[(column_tiles, (rows + tiles.block_m - 1) // tiles.block_m)](
        *pointers, rows, columns, eps, BLOCK_M=tiles.block_m, num_stages=tiles.stages, **options
    )
    return out


def unpacked_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """x [M, K] @ weight.T + bias for many rows: the weight is unpacked, then multiplied by the vendor's library."""
    return F.linear(x, unpack(weight, x.dtype), bias)


def unpack(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """[N, K]; what `PackedWeight.dense` gives, in one pass over memory."""
    out = torch.empty((weight.rows, weight.inner), dtype=dtype, device=weight.values.device)
    row_bytes = weight.values.shape[1]
    spans = max(1, min(1024, next_power_of_2(row_bytes)) // weight.span)
    unpack_kernel[(weight.rows, -(-row_bytes // (spans * weight.span)))](
        weight.values,
        weight.scales,
        weight.zeros if weight.zeros is not None else weight.scales,
        weight.order if weight.order is not None else weight.scales,
        out,
        weight.rows,
        K=weight.inner,
        GROUP=weight.group,
        SPAN=weight.span,
        SPANS=spans,
        CODES=not weight.is_fp8,
        HAS_ZEROS=weight.zeros is not None,
        HAS_ORDER=weight.order is not None,
        num_warps=4,
    )
    return out


def _lines_ahead(weight: PackedWeight) -> int:
    row_bytes = weight.values.shape[1]
    if weight.rows * row_bytes > _SMALL_BYTES:
        return 0
    return int(min(_LINES_AHEAD, next_power_of_2(-(-row_bytes // LINE_BYTES))))
