"""Products of many rows with quantized weights: unpacked for the call, multiplied by the vendor's library.

Knows nothing about models; launches on the current stream without host synchronisation.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from triton import next_power_of_2

from ..quantized.packing import PackedWeight
from .unpack_kernels import unpack_kernel


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
