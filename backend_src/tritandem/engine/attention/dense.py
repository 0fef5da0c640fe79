"""Paged attention in plain torch operations: the truth that every other backend is compared with.

Owns nothing. Runs on any device without reading it back; gathers each row's whole context, so it is
simple rather than fast. Knows nothing about sequences.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from .interface import AttentionBatch
from .kv_type import as_cached, movable


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sink_logits: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of query [S, heads, Q, D] over key and value [S, kv_heads, L, D]; `visible`: bool [S, 1, Q, L].

    Heads are grouped: query head h reads kv head h // (heads / kv_heads). `softcap` c squeezes scores to
    c * tanh(score / c) before the mask, as Gemma 2 does. `sink_logits` [heads] draw weight away, as in gpt-oss.
    """
    if softcap is None and sink_logits is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    scores = (query @ key.transpose(2, 3)).float()
    scores = scores * scaling if softcap is None else softcap * torch.tanh(scores * (scaling / softcap))
    return softmax_with_sink(scores.masked_fill(~visible, float("-inf")), sink_logits).to(value.dtype) @ value


def softmax_with_sink(scores: torch.Tensor, sink_logits: torch.Tensor | None) -> torch.Tensor:
    """Weights of float32 scores [.., heads, Q, L]; with `sink_logits` [heads] they sum up to less than one."""
    if sink_logits is None:
        return scores.softmax(dim=-1)
    sink = sink_logits.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), dim=-1).softmax(dim=-1)[..., :-1]


class DenseAttention:
    """`AttentionBackend` for any device."""

    name = "dense"
    capturable = False

    def fused(self) -> None:
        return None

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        for new, cache in ((key, key_cache), (value, value_cache)):
            stored = movable(as_cached(new, cache.dtype))
            movable(cache).flatten(0, 1).index_copy_(0, batch.slot_mapping, stored)

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        total, device = query.shape[0], query.device
        block_tokens = key_cache.shape[1]
        num_blocks = -(-batch.max_context_tokens // block_tokens)
        tables = batch.block_tables[:, :num_blocks]
        key, value = (  # [S, kv_heads, L, D]
            movable(cache)[tables].view(cache.dtype).to(query.dtype).flatten(1, 2).transpose(1, 2)
            for cache in (key_cache, value_cache)
        )

        reach = torch.arange(key.shape[2], device=device)
        starts = batch.query_starts[:-1].long()
        lens = batch.query_starts[1:].long() - starts
        # Behind a row's context, and before its windows, lies what others left: a NaN there would pass a mask, as
        # 0 * NaN is NaN.
        foreign = reach >= batch.context_lens[:, None]
        if sliding_window is not None:
            foreign |= reach <= (batch.context_lens.long() - lens - sliding_window)[:, None]
        key = key.masked_fill(foreign[:, None, :, None], 0.0)
        value = value.masked_fill(foreign[:, None, :, None], 0.0)

        offsets = torch.arange(batch.max_query_tokens, device=device)
        padded = query[(starts[:, None] + offsets).clamp(max=total - 1)].transpose(1, 2)  # [S, heads, Q, D]

        position = (batch.context_lens.long() - lens)[:, None] + offsets  # [S, Q]
        visible = reach <= position.clamp(min=0)[:, :, None]  # a padding row sees one position instead of none
        if sliding_window is not None:
            visible &= reach > position[:, :, None] - sliding_window
        out = masked_attention(padded, key, value, visible[:, None], scaling, softcap, sink_logits)

        token = torch.arange(total, device=device)
        row = torch.searchsorted(batch.query_starts[1:].long(), token, right=True).clamp(max=starts.shape[0] - 1)
        return out[row, :, token - starts[row]]
