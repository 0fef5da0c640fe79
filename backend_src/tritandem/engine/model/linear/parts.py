"""Launches of the kernels that multiply two FP8 parts of each activation, and how a product is cut.

Knows nothing about models; launches on the current stream without host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton import next_power_of_2

from ..quantized.packing import PackedWeight
from ..quantized.weight import FP8
from .few_rows import LinearTiles
from .interface import Norm
from .parts_kernels import parts_kernel, split_kernel
from .rowwise import silu_mul

MOST_GATED = 32  # rows: beyond, two sums of a tile do not fit registers
MOST_ROWS = 128  # beyond, unpacking the weight once is cheaper than reading it for every tile of rows
# FP8 with a scale a row: beyond, the library's product of FP8 by FP8 is. A layer of an 8B model takes an H200 75 us in
# parts and 85 by the library at one row, 89 and 86 at 16, 137 and 91 at 64.
MOST_BY_ROW = 8


@dataclass(frozen=True, slots=True)
class Parts:
    """Rows as a weight multiplies them: `values` FP8 [M, 2, K], high and low part; `scales` float32 [M]; `sums` float32
    [K / span, M, 2] of the parts, where the weight is in codes."""

    values: torch.Tensor
    scales: torch.Tensor
    sums: torch.Tensor | None


def choose_parts_tiles(rows: int, columns: int, codes: bool, gated: bool = False) -> LinearTiles:
    """Pure; swept on an H200. Eight rows at least: sixteen columns of the matrix unit. Stages: what is under way has to
    hide the memory's latency where programs are fewer than multiprocessors. A span is read at once."""
    block_m = min(32, max(8, next_power_of_2(rows)))
    if gated:
        return LinearTiles(block_m, 64, 0, 8 if block_m == 32 else 4, 4 if block_m == 8 else 3)
    return LinearTiles(block_m, 64, 0, 4, {8: 12, 16: 6, 32: 4}[block_m])


def uses_parts(weight: PackedWeight, rows: int, dtype: torch.dtype) -> bool:
    """Two parts hold less than float32's digits."""
    return dtype != torch.float32 and rows <= (MOST_BY_ROW if weight.by_row else MOST_ROWS)


def split(
    x: torch.Tensor | None,
    weight: PackedWeight,
    residual: torch.Tensor | None = None,
    norm: Norm | None = None,
    overlap: bool = False,
) -> Parts:
    """`x` [M, K] in parts; with `norm` those of the norm of `residual`, to which `x` was added, in place."""
    given = residual if residual is not None else x
    assert given is not None
    rows, inner = given.shape
    device = given.device
    codes = not weight.is_fp8
    values = torch.empty((rows, 2, inner), dtype=FP8, device=device)
    scales = torch.empty(rows, dtype=torch.float32, device=device)
    sums = torch.empty((inner // weight.span, rows, 2), dtype=torch.float32, device=device) if codes else None
    block = next_power_of_2(inner)
    split_kernel[(rows,)](
        x if x is not None else given,
        given,
        norm.weight if norm is not None else given,
        weight.order if weight.order is not None else given,
        values,
        scales,
        sums if sums is not None else scales,
        rows,
        norm.eps if norm is not None else 0.0,
        K=inner,
        SPAN=weight.span,
        BLOCK_K=block,
        HAS_ADD=norm is not None and x is not None,
        HAS_NORM=norm is not None,
        HAS_ORDER=weight.order is not None,
        HAS_SUMS=codes,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=int(min(32, max(4, block // 512))),
    )
    return Parts(values, scales, sums)


def parts_linear(
    x: Parts,
    weight: PackedWeight,
    dtype: torch.dtype,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    overlap: bool = False,
) -> torch.Tensor:
    """[residual +] x @ weight.T + bias, or silu(gate) * up of it, as `quantized_linear`."""
    rows, inner = x.values.shape[0], x.values.shape[2]
    if gated and rows > MOST_GATED:
        return silu_mul(parts_linear(x, weight, dtype, overlap=overlap), overlap)
    columns = weight.rows // 2 if gated else weight.rows
    codes = not weight.is_fp8
    tiles = choose_parts_tiles(rows, columns, codes, gated)
    out = residual if residual is not None else torch.empty((rows, columns), dtype=dtype, device=x.values.device)
    parts_kernel[(-(-rows // tiles.block_m), -(-columns // tiles.block_n))](
        x.values,
        x.scales,
        x.sums if x.sums is not None else x.scales,
        weight.values,
        weight.scales,
        weight.zeros if weight.zeros is not None else weight.scales,
        bias if bias is not None else x.scales,
        out,
        out,
        rows,
        columns,
        K=inner,
        GROUP=weight.group,
        SPAN=weight.span,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        CODES=codes,
        HAS_ZEROS=weight.zeros is not None,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        GATED=gated,
        OVERLAP=overlap,
        AT_ONCE=weight.values.is_cuda,
        launch_pdl=overlap,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out
