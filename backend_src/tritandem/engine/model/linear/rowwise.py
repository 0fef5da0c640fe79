"""Launches of the row-wise kernels around the products: norm with the addition before it, and the gate."""

from __future__ import annotations

import torch
from triton import next_power_of_2

from .interface import Norm
from .row_kernels import add_norm_kernel, silu_mul_kernel


def add_norm(delta: torch.Tensor | None, residual: torch.Tensor, norm: Norm, overlap: bool) -> torch.Tensor:
    """residual [T, K] += delta, in place; returns its RMS norm."""
    out = torch.empty_like(residual)
    width = residual.shape[1]
    add_norm_kernel[(residual.shape[0],)](
        residual if delta is None else delta,
        residual,
        norm.weight,
        out,
        norm.eps,
        K=width,
        BLOCK_K=next_power_of_2(width),
        HAS_ADD=delta is not None,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=4 if width <= 2048 else 8,
    )
    return out


def silu_mul(gate_up: torch.Tensor, overlap: bool) -> torch.Tensor:
    """[T, 2 * N] (gate first) -> [T, N]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, next_power_of_2(width))
    silu_mul_kernel[(rows, (width + block - 1) // block)](
        gate_up, out, N=width, BLOCK_N=block, OVERLAP=overlap, launch_pdl=overlap, num_warps=4
    )
    return out
