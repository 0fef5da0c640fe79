"""Products of FP8 with FP8 for many rows, and the launches of what surrounds them.

The vendor's product with one scale for everything is fast at any number of rows, the one with scales of rows and
columns is slow at few: up to `FEW_TO_SCALE` rows they are left out (1 is given) and applied in the kernel behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton import next_power_of_2

from ..quantized.packing import PackedWeight
from ..quantized.weight import FP8
from .fp8_kernels import add_norm_fp8_kernel, gate_fp8_kernel, rows_fp8_kernel, scale_kernel
from .interface import Norm

# Rows. On an H200 (torch 2.11) the products of an 8B model take 2.26 / 3.38 / 23.1 ms at 64 / 256 / 2,048 rows with one
# scale, 3.43 / 3.90 / 23.6 with scales of rows and columns; to apply those takes three more launches a layer.
FEW_TO_SCALE = 384


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """What is multiplied: `values` FP8 [T, K], of which row t is to be taken times scales[t], float32 [T]."""

    values: torch.Tensor
    scales: torch.Tensor


@dataclass(frozen=True, slots=True)
class Product:
    """[T, N]. With `row_scales` it lacks those and the weight's."""

    values: torch.Tensor
    row_scales: torch.Tensor | None


def add_norm_fp8(
    delta: torch.Tensor | None, residual: torch.Tensor, norm: Norm, static_scale: float | None = None
) -> Fp8Rows:
    """residual [T, K] += delta, in place; returns its RMS norm. `static_scale`: of every row; None: each its own."""
    rows, width = residual.shape
    made = _empty(residual, width)
    add_norm_fp8_kernel[(rows,)](
        residual if delta is None else delta,
        residual,
        norm.weight,
        made.values,
        made.scales,
        static_scale or 1.0,
        norm.eps,
        K=width,
        BLOCK_K=next_power_of_2(width),
        HAS_ADD=delta is not None,
        STATIC=static_scale is not None,
        num_warps=_warps(width),
    )
    return made


def rows_fp8(x: torch.Tensor, static_scale: float | None = None) -> Fp8Rows:
    rows, width = x.shape
    made = _empty(x, width)
    rows_fp8_kernel[(rows,)](
        x,
        made.values,
        made.scales,
        static_scale or 1.0,
        K=width,
        BLOCK_K=next_power_of_2(width),
        STATIC=static_scale is not None,
        num_warps=_warps(width),
    )
    return made


def multiply(x: Fp8Rows, weight: PackedWeight, one: torch.Tensor, dtype: torch.dtype) -> Product:
    """x @ weight.T. `one`: a float32 1 on the device. Without its scales it is bfloat16: float16 ends at 65,504."""
    transposed = weight.values.t()
    if x.values.shape[0] <= FEW_TO_SCALE:
        bare = torch._scaled_mm(x.values, transposed, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
        return Product(bare, x.scales)
    scales = weight.scales.view(1, -1)
    full = torch._scaled_mm(
        x.values, transposed, x.scales[:, None], scales, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return Product(full.to(dtype), None)


def gate(
    product: Product, weight: PackedWeight, dtype: torch.dtype, to_fp8: bool, static_scale: float | None = None
) -> torch.Tensor | Fp8Rows:
    """silu(gate) * up of a product [T, 2 * N], gate first; in FP8 under `static_scale`, None: a scale a row."""
    rows, width = product.values.shape[0], product.values.shape[1] // 2
    scaled = product.row_scales is not None
    made = _empty(product.values, width) if to_fp8 else None
    out = made.values if made is not None else product.values.new_empty((rows, width), dtype=dtype)
    gate_fp8_kernel[(rows,)](
        product.values,
        product.row_scales if scaled else weight.scales,
        weight.scales,
        out,
        made.scales if made is not None else weight.scales,
        static_scale or 1.0,
        N=width,
        BLOCK_N=next_power_of_2(width),
        HAS_SCALES=scaled,
        TO_FP8=to_fp8,
        STATIC=static_scale is not None,
        num_warps=_warps(width),
    )
    return made if made is not None else out


def finish(
    product: Product,
    weight: PackedWeight,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product [T, N] with its scales and `bias`, or, where it still lacked scales, `residual` with it added."""
    values, row_scales = product.values, product.row_scales
    if row_scales is None:
        return values if bias is None else values.add_(bias)
    rows, width = values.shape
    out = residual if residual is not None else values.new_empty((rows, width), dtype=dtype)
    block = min(1024, next_power_of_2(width))
    scale_kernel[(rows, (width + block - 1) // block)](
        values,
        row_scales,
        weight.scales,
        bias if bias is not None else weight.scales,
        out,
        N=width,
        BLOCK_N=block,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=4,
    )
    return out


def _empty(like: torch.Tensor, width: int) -> Fp8Rows:
    rows = like.shape[0]
    values = torch.empty((rows, width), dtype=FP8, device=like.device)
    return Fp8Rows(values, torch.empty(rows, dtype=torch.float32, device=like.device))


def _warps(width: int) -> int:
    """A row a program: 32 values a thread at most, up to rows of 32,768."""
    return int(min(32, max(4, next_power_of_2(width) // 1024)))
