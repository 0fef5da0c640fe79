"""Launches of the kernels for experts, and which of them a number of tokens gets.

Knows nothing about models; launches on the current stream without host synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton import next_power_of_2

from .interface import Gate
from .kernels import (
    pair_down_kernel,
    pair_gate_up_kernel,
    plan_kernel,
    route_kernel,
    sum_pairs_kernel,
    tile_down_kernel,
    tile_gate_up_kernel,
)

_PLAN_BLOCK, _PLAN_CHUNK = 32, 256
_MOST_TOKENS_A_TILE = 64


@dataclass(frozen=True, slots=True)
class Weights:
    """Of one layer: `gate_up` [E, 2 * columns, inner], `down` [E, inner, columns], contiguous; biases [E, 2 * columns]
    and [E, inner], or None."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    gate: Gate

    @property
    def experts(self) -> int:
        return self.gate_up.shape[0]


def choose_tokens_a_tile(tokens: int, per_token: int, experts: int) -> int | None:
    """1: the kernels for (token, expert) pairs; more: tiles of so many tokens; None: the vendor's grouped product.

    Pure. Pairs read an expert once for each token that chose it: good while that is hardly ever two. Tiles read it once
    for all of them. From where an even routing fills tiles of 64 the arithmetic counts, and the library is for that.
    """
    pairs = tokens * per_token
    if tokens == 1 or 4 * pairs <= experts:
        return 1
    if pairs > _MOST_TOKENS_A_TILE * experts:
        return None
    twice_even: int = next_power_of_2(2 * pairs // experts)
    return min(max(twice_even, 16), _MOST_TOKENS_A_TILE)


def choose_block_k(inner: int) -> int:
    """A power of two in which `inner` elements leave little of the last block empty; the longest of the best."""
    return min((2048, 1024, 512, 256), key=lambda size: (-(-inner // size) * size, -size))


def route(
    logits: torch.Tensor, per_token: int, sum_to_one: bool, overlap: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts (int32 [T, per_token]) and their weights (float32, likewise) by `logits` [T, experts]: softmax over all
    experts, or with `sum_to_one` over those that are taken."""
    rows, experts = logits.shape
    index = torch.empty((rows, per_token), dtype=torch.int32, device=logits.device)
    scores = torch.empty((rows, per_token), dtype=torch.float32, device=logits.device)
    route_kernel[(rows,)](
        logits,
        index,
        scores,
        experts,
        BLOCK_E=next_power_of_2(experts),
        TOP_K=per_token,
        BLOCK_T=next_power_of_2(per_token),
        SUM_TO_ONE=sum_to_one,
        OVERLAP=overlap,
        launch_pdl=overlap,
        num_warps=1 if experts <= 128 else 4,
    )
    return index, scores


def by_pairs(
    x: torch.Tensor,
    index: torch.Tensor,
    scores: torch.Tensor,
    weights: Weights,
    residual: torch.Tensor | None,
    overlap: bool,
) -> torch.Tensor:
    """`interface.ExpertsProduct` in two launches; with `residual` that is what is returned."""
    rows, inner = x.shape
    columns, per_token = weights.down.shape[2], index.shape[1]
    act = torch.empty((rows * per_token, columns), dtype=x.dtype, device=x.device)
    out = residual if residual is not None else torch.empty_like(x)
    gate, bias, down_bias = weights.gate, weights.gate_up_bias, weights.down_bias
    shared = {"TOP_K": per_token, "OVERLAP": overlap, "launch_pdl": overlap, "num_stages": 1}
    block_n, block_k = 2, choose_block_k(inner)
    pair_gate_up_kernel[(rows * per_token, -(-columns // block_n))](
        x,
        index,
        weights.gate_up,
        bias if bias is not None else x,
        act,
        columns,
        gate.alpha,
        gate.limit,
        K=inner,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        GATE=gate.kind,
        INTERLEAVED=gate.interleaved,
        HAS_BIAS=bias is not None,
        num_warps=8 if block_k > 1024 else 4,
        **shared,
    )
    block_n, block_k = 8, choose_block_k(columns)
    pair_down_kernel[(rows, -(-inner // block_n))](
        act,
        index,
        scores,
        weights.down,
        down_bias if down_bias is not None else x,
        out,
        out,
        inner,
        K=columns,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        HAS_BIAS=down_bias is not None,
        HAS_RESIDUAL=residual is not None,
        num_warps=8 if block_k > 512 else 4,
        **shared,
    )
    return out


def by_tiles(
    x: torch.Tensor,
    index: torch.Tensor,
    scores: torch.Tensor,
    weights: Weights,
    tokens_a_tile: int,
    residual: torch.Tensor | None,
    overlap: bool,
) -> torch.Tensor:
    """The same in four launches. The grid has room for the worst routing: every expert's last tile may be short."""
    rows, inner = x.shape
    columns, per_token, experts = weights.down.shape[2], index.shape[1], weights.experts
    pairs = rows * per_token
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    begins = torch.empty(experts + 1, dtype=torch.int32, device=x.device)
    act = torch.empty((pairs, columns), dtype=x.dtype, device=x.device)
    parts = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    out = residual if residual is not None else torch.empty_like(x)
    launch = {"OVERLAP": overlap, "launch_pdl": overlap, "num_warps": 4}
    plan_kernel[(-(-pairs // _PLAN_BLOCK) - (-(experts + 1) // _PLAN_BLOCK),)](
        index, order, begins, pairs, E=experts, BLOCK=_PLAN_BLOCK, CHUNK=_PLAN_CHUNK, **launch
    )
    most_tiles = min(pairs, experts) + pairs // tokens_a_tile
    gate, bias, down_bias = weights.gate, weights.gate_up_bias, weights.down_bias
    tiles = {
        "E": experts,
        "BLOCK_E": next_power_of_2(experts),
        "BLOCK_M": tokens_a_tile,
        "BLOCK_N": 64,
        "BLOCK_K": 64 if x.element_size() == 2 else 32,
        "num_stages": 4 if x.element_size() == 2 else 2,
        **launch,
    }
    tile_gate_up_kernel[(-(-columns // 64), most_tiles)](
        x,
        order,
        begins,
        weights.gate_up,
        bias if bias is not None else x,
        act,
        columns,
        gate.alpha,
        gate.limit,
        K=inner,
        TOP_K=per_token,
        GATE=gate.kind,
        INTERLEAVED=gate.interleaved,
        HAS_BIAS=bias is not None,
        **tiles,
    )
    tile_down_kernel[(-(-inner // 64), most_tiles)](
        act,
        order,
        begins,
        scores,
        weights.down,
        down_bias if down_bias is not None else x,
        parts,
        inner,
        K=columns,
        HAS_BIAS=down_bias is not None,
        **tiles,
    )
    block = min(1024, next_power_of_2(inner))
    sum_pairs_kernel[(rows, -(-inner // block))](
        parts, out, out, inner, TOP_K=per_token, BLOCK_N=block, HAS_RESIDUAL=residual is not None, **launch
    )
    return out
