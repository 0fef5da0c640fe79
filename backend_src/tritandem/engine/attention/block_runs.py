"""Paged attention for the CPU: reads the cache where it lies instead of gathering every row's context.

Owns a plan per forward pass, made at its first layer: each row's blocks as runs of neighbours, which are
views of the cache. Exact twin of `dense.py`. Knows nothing about sequences; reads the batch on the host.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from .dense import DenseAttention, masked_attention, softmax_with_sink
from .interface import AttentionBatch

MAX_RUNS = 8  # beyond this, one gather is cheaper than that many small products


@dataclass(frozen=True, slots=True)
class _Row:
    first_token: int  # packed tokens [first_token, end_token)
    end_token: int
    context: int
    runs: list[tuple[int, int]]  # flat cache positions [begin, end) in order of the context
    blocks: torch.Tensor  # int64 [n]


class BlockRunAttention(DenseAttention):
    """`AttentionBackend` for the CPU. Stores as its twin does."""

    name = "block_runs"

    def __init__(self) -> None:
        self._planned_for: AttentionBatch | None = None
        self._rows: list[_Row] = []

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
        if self._planned_for is not batch:
            self._rows = plan_rows(batch, key_cache.shape[1])
            self._planned_for = batch
        out = torch.zeros(query.shape, dtype=query.dtype)  # rows without a context stay so
        for row in self._rows:
            tokens = slice(row.first_token, row.end_token)
            if row.end_token - row.first_token == 1 and len(row.runs) <= MAX_RUNS:
                attended = _attend_one(
                    query[row.first_token], key_cache, value_cache, row, scaling, sliding_window, softcap, sink_logits
                )
                out[row.first_token] = attended
            else:
                out[tokens] = _attend_many(
                    query[tokens], key_cache, value_cache, row, scaling, sliding_window, softcap, sink_logits
                )
        return out


def plan_rows(batch: AttentionBatch, block_tokens: int) -> list[_Row]:
    """The rows that have a context, each with its runs of neighbouring blocks."""
    rows = []
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    for index, context in enumerate(contexts):
        if context == 0:
            continue
        blocks = batch.block_tables[index, : -(-context // block_tokens)].long()
        runs: list[tuple[int, int]] = []
        left = context
        for block in blocks.tolist():
            begin, size = block * block_tokens, min(block_tokens, left)
            if runs and runs[-1][1] == begin:
                runs[-1] = (runs[-1][0], begin + size)
            else:
                runs.append((begin, begin + size))
            left -= size
        rows.append(_Row(starts[index], starts[index + 1], context, runs, blocks))
    return rows


def _attend_one(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    row: _Row,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """One query token [heads, D] over views of the cache: scores of all runs share one softmax."""
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)  # [positions, kv_heads, D]
    heads, head_dim = query.shape
    grouped = query.reshape(keys.shape[1], -1, head_dim) * scaling  # [kv_heads, group, D]
    hidden = 0 if sliding_window is None else max(0, row.context - sliding_window)
    runs = _skip(row.runs, hidden)
    if len(runs) == 1 and softcap is None and sink_logits is None:
        begin, end = runs[0]
        key = keys[begin:end].to(query.dtype).transpose(0, 1)[None]
        value = values[begin:end].to(query.dtype).transpose(0, 1)[None]
        return functional.scaled_dot_product_attention(grouped[None], key, value, scale=1.0).reshape(heads, head_dim)
    scores = [grouped @ keys[begin:end].to(query.dtype).permute(1, 2, 0) for begin, end in runs]
    merged = (scores[0] if len(scores) == 1 else torch.cat(scores, dim=2)).float()
    if softcap is not None:
        merged = softcap * torch.tanh(merged / softcap)
    merged = merged.view(heads, 1, -1)
    weights = softmax_with_sink(merged, sink_logits).view(*grouped.shape[:2], -1).to(query.dtype)
    out, start = None, 0
    for begin, end in runs:
        part = weights[:, :, start : start + end - begin] @ values[begin:end].to(query.dtype).transpose(0, 1)
        out = part if out is None else out + part
        start += end - begin
    assert out is not None
    return out.reshape(heads, head_dim)


def _attend_many(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    row: _Row,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sink_logits: torch.Tensor | None,
) -> torch.Tensor:
    """A prefill chunk [Q, heads, D]: one gather is small beside the chunk's own work."""
    key = _context(key_cache, row).to(query.dtype)
    value = _context(value_cache, row).to(query.dtype)
    position = torch.arange(row.context - query.shape[0], row.context)[:, None]
    # Before the windows may lie blocks that belong to others by now.
    begin = 0 if sliding_window is None else max(0, row.context - query.shape[0] - sliding_window + 1)
    key, value, reach = key[:, :, begin:], value[:, :, begin:], torch.arange(begin, row.context)
    visible = reach <= position
    if sliding_window is not None:
        visible &= reach > position - sliding_window
    out = masked_attention(query.transpose(0, 1)[None], key, value, visible[None, None], scaling, softcap, sink_logits)
    return out[0].transpose(0, 1)


def _context(cache: torch.Tensor, row: _Row) -> torch.Tensor:
    """[1, kv_heads, context, D], a view where the row's blocks are neighbours."""
    if len(row.runs) == 1:
        begin, end = row.runs[0]
        flat = cache.flatten(0, 1)[begin:end]
    else:
        flat = cache[row.blocks].flatten(0, 1)[: row.context]
    return flat.transpose(0, 1)[None]


def _skip(runs: list[tuple[int, int]], count: int) -> list[tuple[int, int]]:
    """The runs without their first `count` positions."""
    kept = []
    for begin, end in runs:
        cut = min(count, end - begin)
        count -= cut
        if begin + cut < end:
            kept.append((begin + cut, end))
    return kept
