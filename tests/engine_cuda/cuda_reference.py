"""Plain float32 attention and layers that the kernel tests compare with: loops, gathers, no tricks."""

from __future__ import annotations

import dataclasses

import torch
from tritandem.engine.attention.interface import AttentionBatch
from tritandem.engine.rows.state import SlotState


def gathered_context(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """Positions [0, length) of one sequence out of the paged cache: [length, kv_heads, dim], float32."""
    positions = torch.arange(length, device=cache.device)
    block_tokens = cache.shape[1]
    return cache[table[positions // block_tokens].long(), positions % block_tokens].float()


def attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """`query` [T, heads, dim] -> float32 [T, heads, dim]; rows without context give zeros."""
    out = torch.zeros(query.shape, dtype=torch.float32, device=query.device)
    starts = batch.query_starts.tolist()
    for row, length in enumerate(batch.context_lens.tolist()):
        if length == 0:
            continue
        begin, end = starts[row], starts[row + 1]
        group = query.shape[1] // key_cache.shape[2]
        k = gathered_context(key_cache, batch.block_tables[row], length).repeat_interleave(group, dim=1)
        v = gathered_context(value_cache, batch.block_tables[row], length).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", query[begin:end].float(), k) * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length - (end - begin), length, device=query.device)[:, None]
        keys = torch.arange(length, device=query.device)[None, :]
        hidden = keys > at
        if window is not None:
            hidden |= keys <= at - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sink_logits is not None:
            sink = sink_logits.float()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(dim=-1)[..., :length]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Half-split rotary embedding of `x` [T, heads, dim] with `cos`, `sin` [T, dim]."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return wide * cos[:, None, :] + torch.cat((-second, first), dim=-1) * sin[:, None, :]


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got - want‖ / ‖want‖; NaN stays NaN and so fails every comparison."""
    return float((got.float() - want.float()).norm() / want.float().norm().clamp_min(1e-30))


def slot_fields(state: SlotState) -> dict[str, torch.Tensor]:
    return {f.name: v for f in dataclasses.fields(state) if isinstance(v := getattr(state, f.name), torch.Tensor)}


def assert_same_rows(got: SlotState, want: SlotState) -> None:
    for name, value in slot_fields(want).items():
        assert torch.equal(slot_fields(got)[name].cpu(), value.cpu()), name
