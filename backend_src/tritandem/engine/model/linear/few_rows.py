"""Matrix products of few rows on CUDA: where our kernels beat the vendor library's, and their launches.

Knows nothing about models; launches on the current stream without host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton import next_power_of_2

from ...prefetch_kernels import LINE_BYTES
from .few_row_kernels import few_row_kernel, one_row_kernel

_NORM_CHUNK = 256
_LINES_AHEAD = 32  # of a small matrix's row, asked for while the kernel waits: 2,048 elements
_SMALL_COLUMNS, _SMALL_INNER = 8192, 2048
_LARGEST_NORM_AHEAD = 2048  # longer rows would be read by every program twice: their squares come with the product


@dataclass(frozen=True, slots=True)
class LinearTiles:
    """How one product is cut: rows (1: the one-row kernel), columns and inner elements a tile, warps, stages."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def choose_linear_tiles(
    rows: int, columns: int, inner: int, dtype: torch.dtype, gated: bool = False
) -> LinearTiles | None:
    """Tiles for our kernels, or None where the vendor library's product is at least as fast.

    Pure; measured on an H200 as whole decode steps (bench/RESULTS.md). One row: plain multiply-adds
    read the weights faster than any matrix-unit kernel tried; a gated program reads twice the rows, so it takes
    half as many. Up to 64 rows of a small matrix, 16 of a larger one: launches are what costs, so fusing norm,
    gate and residual pays, and kernels that overlap the one before them, which is when their weights may come from
    memory already, pay once more. Everything else, long
    inner dimensions and heads over a whole vocabulary among it: the library.
    """
    if dtype == torch.float32:
        return None
    if rows == 1:
        if inner <= 1024:
            return LinearTiles(1, 4, next_power_of_2(inner), 4, 1)
        if inner <= 8192:
            return LinearTiles(1, 2 if gated else 4, 2048, 8, 1)
        return LinearTiles(1, 4 if gated else 8, 512, 4, 1)
    if _is_small(columns, inner):
        if rows <= 16:
            return LinearTiles(16, 16, 128, 4, 5)
        if rows <= 32:
            return LinearTiles(16, 16, 64, 4, 9)
        if rows <= 64:
            return LinearTiles(32, 64, 64, 4, 5) if inner <= 1024 else LinearTiles(16, 16, 64, 2, 9)
        return None
    if rows <= 16 and inner <= 8192 and columns <= 32768:
        return LinearTiles(16, 64, 128, 4, 4)
    return None


def _is_small(columns: int, inner: int) -> bool:
    """A matrix whose product takes about as long as its launch and the memory's latency."""
    return columns <= _SMALL_COLUMNS and inner <= _SMALL_INNER


def _lines_ahead(columns: int, inner: int, element_bytes: int) -> int:
    """Larger matrices keep the memory busy by themselves: asked for ahead, theirs took 10 to 20 percent longer."""
    lines = -(-inner * element_bytes // LINE_BYTES)
    return min(_LINES_AHEAD, next_power_of_2(lines)) if _is_small(columns, inner) else 0


def few_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiles: LinearTiles,
    *,
    norm_eps: float | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    overlap: bool = False,
) -> torch.Tensor:
    """[residual +] (x / rms(x)) @ weight.T + bias, or silu(gate) * up of it; all contiguous.

    `x` [M, K]; `weight` [N, K], with `gated` [2 * N, K] (gate rows first); returns [M, N]. Without `norm_eps`
    x is not normed. With `residual` [M, N] the sum is written into it and it is returned. With `overlap` the
    kernel may start while the one before it ends (it waits before it reads `x`).
    """
    rows, inner = x.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    out = residual if residual is not None else torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    column_tiles = (columns + tiles.block_n - 1) // tiles.block_n
    options = {
        "K": inner,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
        "HAS_NORM": norm_eps is not None,
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "GATED": gated,
        "OVERLAP": overlap,
        "LINES_AHEAD": _lines_ahead(columns, inner, weight.element_size()),
        "launch_pdl": overlap,
        "num_warps": tiles.warps,
    }
    pointers = (x, weight, bias if bias is not None else x, out, out)
    if tiles.block_m == 1:
        one_row_kernel[(column_tiles,)](*pointers, columns, norm_eps or 0.0, **options)
        return out
    few_row_kernel[(column_tiles, (rows + tiles.block_m - 1) // tiles.block_m)](
        *pointers,
        rows,
        columns,
        norm_eps or 0.0,
        BLOCK_M=tiles.block_m,
        NORM_K=min(_NORM_CHUNK, next_power_of_2(inner)) if inner <= _LARGEST_NORM_AHEAD else 0,
        num_stages=tiles.stages,
        **options,
    )
    return out
