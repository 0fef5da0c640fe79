"""Matrix products of few rows on CUDA: tile choice and launch of `linear_kernels.py`.

Knows nothing about models; launches on the current stream without host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .linear_kernels import linear_kernel


@dataclass(frozen=True, slots=True)
class LinearTiles:
    """How one product is cut: rows, columns and inner elements a tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int


def few_row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    tiles: LinearTiles,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    overlap: bool = False,
) -> torch.Tensor:
    """[residual +] rms_norm(x) @ weight.T + bias, or silu(gate) * up of it; all contiguous.

    `x` [M, K]; `weight` [N, K], with `gated` [2 * N, K] (gate rows first); returns [M, N]. With `residual`
    [M, N] the sum is written into it and it is returned.
    """
    rows, inner = x.shape
    columns = weight.shape[0] // 2 if gated else weight.shape[0]
    out = residual if residual is not None else torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    norm_weight, eps = norm if norm is not None else (x, 0.0)
    grid = ((columns + tiles.block_n - 1) // tiles.block_n, (rows + tiles.block_m - 1) // tiles.block_m)
    linear_kernel[grid](
        x,
        weight,
        bias if bias is not None else x,
        out,
        norm_weight,
        out,
        rows,
        columns,
        eps,
        K=inner,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out


def choose_linear_tiles(rows: int, columns: int, inner: int, dtype: torch.dtype) -> LinearTiles | None:
    """Tiles for the few-row kernel, or None where the vendor library's product is faster.

    Pure; measured on an H200 (loadtest/benchmarks/RESULTS.md). Small matrices are bound by the latency of a
    launch, so what the kernel fuses (norm, gate, residual) counts; large ones by the bandwidth of reading
    the weights.
    """
    if dtype == torch.float32 or rows > 64 or inner > 2048:
        return None
    block_m = 16 if rows <= 16 else 32 if rows <= 32 else 64
    if columns >= 16384:
        return None
    return LinearTiles(block_m=block_m, block_n=16, block_k=64, warps=4, stages=5)
