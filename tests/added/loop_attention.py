"""An attention backend: one sequence after the other, in float64. It also does what a fused decoder asks for."""

from __future__ import annotations

import torch
from tritandem.engine.attention.interface import AttentionBatch, FusedAttention, RotaryQKV


class LoopAttention:
    name, capturable = "loop", False

    def __init__(self) -> None:
        self.calls = 0

    def fused(self) -> FusedAttention:
        return self

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        key_cache.flatten(0, 1)[batch.slot_mapping] = key
        value_cache.flatten(0, 1)[batch.slot_mapping] = value

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
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sliding_window is None
        assert softcap is None
        assert sink_logits is None
        self.calls += 1
        out = torch.zeros_like(query) if out is None else out.view(query.shape)
        group = query.shape[1] // key_cache.shape[2]
        starts = batch.query_starts.tolist()
        for row, reach in enumerate(batch.context_lens.tolist()):
            if reach == 0:
                continue
            blocks = batch.block_tables[row].long()
            keys, values = (
                cache[blocks].flatten(0, 1)[:reach].repeat_interleave(group, dim=1).double()
                for cache in (key_cache, value_cache)
            )
            own = slice(starts[row], starts[row + 1])
            scores = torch.einsum("qhd,khd->hqk", query[own].double(), keys) * scaling
            positions = torch.arange(reach - (own.stop - own.start), reach)
            scores = scores.masked_fill(torch.arange(reach)[None] > positions[:, None], float("-inf"))
            out[own] = torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values).to(query.dtype)
        return out

    def rotate_store(
        self,
        qkv: torch.Tensor,
        rotary: RotaryQKV,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        assert rotary.query_norm is None
        kv_heads, dim = key_cache.shape[2:]
        heads = qkv.view(len(qkv), -1, dim)
        first, second = heads[:, :-kv_heads].chunk(2, dim=-1)
        cos, sin = rotary.cos[positions][:, None], rotary.sin[positions][:, None]
        turned = heads[:, :-kv_heads] * cos + torch.cat((-second, first), dim=-1) * sin
        key_cache.flatten(0, 1)[slot_mapping] = turned[:, -kv_heads:]
        value_cache.flatten(0, 1)[slot_mapping] = heads[:, -kv_heads:]
        return turned[:, :-kv_heads]

    def decode_fused(
        self,
        qkv: torch.Tensor,
        rotary: RotaryQKV,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
        table_rows: torch.Tensor,
        scaling: float,
        sliding_window: int | None = None,
        sink_logits: torch.Tensor | None = None,
        overlap: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        tables, block_tokens = batch.block_tables[table_rows], key_cache.shape[1]
        positions = (batch.context_lens.long() - 1).clamp(min=0)
        blocks = tables.gather(1, (positions // block_tokens)[:, None])[:, 0].long()
        mapping = blocks * block_tokens + positions % block_tokens
        query = self.rotate_store(qkv, rotary, key_cache, value_cache, positions, mapping)
        every = torch.arange(len(qkv) + 1)
        rows = AttentionBatch(mapping, tables, batch.context_lens, every, 1, batch.max_context_tokens, decode=True)
        return self.attend(query, key_cache, value_cache, rows, scaling, sliding_window, None, sink_logits, out)
