"""The dense reference equals attention written out, and the CPU backend equals the dense reference."""

from __future__ import annotations

import math

import pytest
import torch
from tritandem.contracts.errors import ConfigError
from tritandem.engine.attention.block_runs import MAX_RUNS, BlockRunAttention, plan_rows
from tritandem.engine.attention.dense import DenseAttention
from tritandem.engine.attention.interface import AttentionBackend, AttentionBatch
from tritandem.engine.attention.kv_type import FP8, as_cached, resolve_kv_type

BLOCK_TOKENS, KV_HEADS, HEAD_DIM = 4, 2, 8


def random_batch(rows: list[tuple[int, int]], seed: int, neighbours: bool) -> AttentionBatch:
    """`rows`: (context, query tokens); context 0 is a padding row."""
    generator = torch.Generator().manual_seed(seed)
    width = max(-(-context // BLOCK_TOKENS) for context, _ in rows)
    count = len(rows) * width
    order = torch.arange(count) if neighbours else torch.randperm(count, generator=generator)
    tables = (order + 1).view(len(rows), width).to(torch.int32)
    mapping = []
    for row, (context, queries) in enumerate(rows):
        if not context:
            mapping += [0] * queries
        for position in range(context - queries, context):
            if context:
                mapping.append(int(tables[row, position // BLOCK_TOKENS]) * BLOCK_TOKENS + position % BLOCK_TOKENS)
    queries = torch.tensor([queries for _, queries in rows])
    return AttentionBatch(
        slot_mapping=torch.tensor(mapping),
        block_tables=tables,
        context_lens=torch.tensor([context for context, _ in rows], dtype=torch.int32),
        query_starts=torch.cat((torch.zeros(1), queries.cumsum(0))).to(torch.int32),
        max_query_tokens=int(queries.max()),
        max_context_tokens=max(context for context, _ in rows),
        decode=bool((queries == 1).all()),
    )


def owned_places(batch: AttentionBatch, blocks: int) -> torch.Tensor:
    """bool [blocks * BLOCK_TOKENS]: the positions of some row's context."""
    owned = torch.zeros(blocks, BLOCK_TOKENS, dtype=torch.bool)
    for table, context in zip(batch.block_tables.long(), batch.context_lens.tolist(), strict=True):
        position = torch.arange(context)
        owned[table[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = True
    return owned.flatten()


def written_out(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    batch: AttentionBatch,
    window: int | None,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One query, one head, one position at a time."""
    out = torch.zeros_like(query)
    flat_keys, flat_values = keys.flatten(0, 1), values.flatten(0, 1)
    group = query.shape[1] // KV_HEADS
    for row, context in enumerate(batch.context_lens.tolist()):
        start, end = batch.query_starts[row : row + 2].tolist()
        for token in range(start, end if context else start):
            position = context - (end - token)
            seen = range(0 if window is None else max(0, position - window + 1), position + 1)
            places = [int(batch.block_tables[row, p // BLOCK_TOKENS]) * BLOCK_TOKENS + p % BLOCK_TOKENS for p in seen]
            for head in range(query.shape[1]):
                scores = flat_keys[places, head // group] @ query[token, head] / math.sqrt(HEAD_DIM)
                if cap is not None:
                    scores = cap * torch.tanh(scores / cap)
                weights = scores.exp() / (scores.exp().sum() + (0 if sinks is None else sinks[head].exp()))
                out[token, head] = weights @ flat_values[places, head // group]
    return out


ROWS = {
    "decode": [(1, 1), (17, 1), (0, 1), (40, 1), (4, 1)],
    "prefill": [(9, 9), (33, 12), (20, 1), (6, 2)],
    "mixed": [(30, 16), (29, 1), (12, 12), (3, 1)],
}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("heads", [2, 6])
@pytest.mark.parametrize(("window", "cap"), [(None, None), (5, None), (None, 2.0), (16, 2.0)])
@pytest.mark.parametrize("neighbours", [True, False])
@pytest.mark.parametrize("sink", [False, True])
def test_backends_equal_attention_written_out(
    rows: list[tuple[int, int]], heads: int, window: int | None, cap: float | None, neighbours: bool, sink: bool
) -> None:
    batch = random_batch(rows, seed=heads, neighbours=neighbours)
    torch.manual_seed(1)
    blocks = int(batch.block_tables.max()) + 1
    keys, values = torch.randn(2, blocks, BLOCK_TOKENS, KV_HEADS, HEAD_DIM)
    query = torch.randn(len(batch.slot_mapping), heads, HEAD_DIM)
    for cache in (keys, values):  # what no row stored itself, the null block included, may hold anything
        cache.flatten(0, 1)[~owned_places(batch, blocks)] = float("nan")
    new_keys, new_values = torch.randn(2, len(batch.slot_mapping), KV_HEADS, HEAD_DIM)
    DenseAttention().store(new_keys, new_values, keys, values, batch)
    sinks = torch.randn(heads) if sink else None
    truth = written_out(query, keys, values, batch, window, cap, sinks)
    real = torch.repeat_interleave(batch.context_lens > 0, batch.query_starts.diff())
    for backend in (DenseAttention(), BlockRunAttention()):
        out = backend.attend(query, keys, values, batch, HEAD_DIM**-0.5, window, cap, sinks)
        torch.testing.assert_close(out[real], truth[real], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("kv_type", [FP8, torch.bfloat16])
def test_a_smaller_cache_is_attended_to_as_what_it_holds(rows: list[tuple[int, int]], kv_type: torch.dtype) -> None:
    for neighbours, cap, seed in ((True, None, 1), (False, 2.0, 2)):
        batch = random_batch(rows, seed=seed, neighbours=neighbours)
        torch.manual_seed(seed)
        blocks = int(batch.block_tables.max()) + 1
        keys, values = torch.randn(2, blocks, BLOCK_TOKENS, KV_HEADS, HEAD_DIM).to(kv_type)
        new_keys, new_values = torch.randn(2, len(batch.slot_mapping), KV_HEADS, HEAD_DIM)
        DenseAttention().store(new_keys, new_values, keys, values, batch)
        stored = keys.flatten(0, 1)[batch.slot_mapping][batch.slot_mapping > 0].float()
        torch.testing.assert_close(stored, new_keys[batch.slot_mapping > 0], atol=0.01, rtol=1 / 16)
        query = torch.randn(len(batch.slot_mapping), 4, HEAD_DIM)
        truth = written_out(query, keys.float(), values.float(), batch, None, cap, None)
        real = torch.repeat_interleave(batch.context_lens > 0, batch.query_starts.diff())
        for backend in (DenseAttention(), BlockRunAttention()):
            out = backend.attend(query, keys, values, batch, HEAD_DIM**-0.5, None, cap)
            assert out.dtype == query.dtype
            torch.testing.assert_close(out[real], truth[real], atol=1e-5, rtol=1e-4)


def test_what_fp8_cannot_hold_is_cut_to_its_range_and_nan_stays() -> None:
    given = torch.tensor([1.0, 449.0, -1e4, float("inf"), 0.3, float("nan")])
    held = as_cached(given, FP8).float()
    assert held[:4].tolist() == [1.0, 448.0, -448.0, 448.0]
    assert held[4] == pytest.approx(0.3, rel=1 / 16)
    assert held[5].isnan()


def test_the_cache_has_the_type_that_is_asked_for() -> None:
    cpu = torch.device("cpu")
    assert resolve_kv_type("auto", torch.float16, cpu) == torch.float16
    assert resolve_kv_type("bf16", torch.float32, cpu) == torch.bfloat16
    assert resolve_kv_type("fp8_e4m3", torch.float32, cpu) == FP8


def test_a_gpu_that_cannot_convert_fp8_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"engine.kv_dtype: given fp8_e4m3, .* A100: auto, bf16; FP8 .*8\.9"):
        resolve_kv_type("fp8_e4m3", torch.bfloat16, device)
    assert resolve_kv_type("bf16", torch.bfloat16, device) == torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert resolve_kv_type("fp8_e4m3", torch.bfloat16, device) == FP8


@pytest.mark.parametrize("backend", [DenseAttention(), BlockRunAttention()], ids=lambda backend: backend.name)
def test_rows_without_a_context_attend_to_nothing(backend: AttentionBackend) -> None:
    batch = random_batch([(0, 1), (5, 1)], seed=0, neighbours=True)
    keys, values = torch.full((2, 8, BLOCK_TOKENS, KV_HEADS, HEAD_DIM), float("nan"))
    out = backend.attend(torch.randn(2, 4, HEAD_DIM), keys, values, batch, 1.0)
    assert (out[0] == 0).all()


def test_neighbouring_blocks_become_one_run() -> None:
    batch = random_batch([(18, 1)], seed=0, neighbours=True)
    assert plan_rows(batch, BLOCK_TOKENS)[0].runs == [(4, 22)]


def test_scattered_rows_are_gathered_beyond_the_run_limit() -> None:
    batch = random_batch([(200, 1), (3, 1)], seed=2, neighbours=False)
    assert len(plan_rows(batch, BLOCK_TOKENS)[0].runs) > MAX_RUNS
    torch.manual_seed(0)
    keys, values = torch.randn(2, 101, BLOCK_TOKENS, KV_HEADS, HEAD_DIM)
    query = torch.randn(2, 4, HEAD_DIM)
    ours = BlockRunAttention().attend(query, keys, values, batch, 0.3)
    torch.testing.assert_close(ours, DenseAttention().attend(query, keys, values, batch, 0.3), atol=1e-5, rtol=1e-4)
