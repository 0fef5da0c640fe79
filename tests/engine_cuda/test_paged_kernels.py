"""The paged kernels equal plain attention over random lengths, block tables, windows and head shapes."""

from __future__ import annotations

import pytest
import torch
from tritandem.engine.attention.interface import AttentionBatch
from tritandem.engine.attention.kv_type import FP8, as_cached

from tests.engine_cuda import cuda_reference as reference

BLOCK_TOKENS = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def random_batch(
    lengths: list[int], query_lens: list[int], heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch]:
    """Random K/V in shuffled blocks, poisoned (NaN) wherever no sequence owns the position."""
    generator = torch.Generator().manual_seed(sum(lengths) + heads[0])
    query_heads, kv_heads, dim = heads
    per_row = [(n + BLOCK_TOKENS - 1) // BLOCK_TOKENS for n in lengths]
    order = (torch.randperm(sum(per_row), generator=generator) + 1).tolist()
    tables = torch.zeros(len(lengths), max(per_row) + 2, dtype=torch.int32)
    shape = (sum(per_row) + 1, BLOCK_TOKENS, kv_heads, dim)
    caches = [torch.full(shape, float("nan")) for _ in range(2)]
    slots: list[int] = []
    for row, length in enumerate(lengths):
        blocks = [order.pop() for _ in range(per_row[row])]
        tables[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        flat = [blocks[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in range(length)]
        for cache in caches:
            cache.view(-1, kv_heads, dim)[flat] = torch.randn(length, kv_heads, dim, generator=generator)
        slots += flat[length - query_lens[row] :] if length else [0]
    starts = torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32)
    query = torch.randn(int(starts[-1]), query_heads, dim, generator=generator)
    batch = AttentionBatch(
        slot_mapping=torch.tensor(slots, device=device),
        block_tables=tables.to(device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        query_starts=starts.to(device),
        max_query_tokens=max(query_lens),
        max_context_tokens=max(lengths),
        decode=all(n == 1 for n in query_lens),
    )
    return query.to(device, dtype), caches[0].to(device, dtype), caches[1].to(device, dtype), batch


def dtypes(device: torch.device) -> list[torch.dtype]:
    return [torch.float32, torch.bfloat16] if device.type == "cuda" else [torch.float32]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "window", "softcap"),
    [
        ((4, 4, 64), None, None),
        ((9, 3, 64), 20, None),
        ((8, 2, 80), None, 5.0),
        ((6, 2, 96), 33, 8.0),
        ((32, 8, 128), None, None),
        ((4, 1, 256), 16, None),
    ],
)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("sink", [False, True])
def test_paged_attention_equals_plain_attention(
    kernel_device: torch.device,
    heads: tuple[int, int, int],
    window: int | None,
    softcap: float | None,
    kind: str,
    sink: bool,
) -> None:
    from tritandem.engine.attention.paged import Heads, PagedAttention

    for dtype in dtypes(kernel_device):
        lengths = [1, 0, 17, 130, 64, 300] if kind == "decode" else [1, 17, 130, 64, 5]
        query_lens = [1] * len(lengths) if kind == "decode" else [1, 17, 37, 64, 3]
        query, keys, values, batch = random_batch(lengths, query_lens, heads, dtype, kernel_device)
        backend = PagedAttention([Heads(*heads)], len(lengths), kernel_device)
        scaling = heads[2] ** -0.5
        sinks = torch.linspace(-2.0, 3.0, heads[0]).to(kernel_device, dtype) if sink else None
        for _ in range(2):  # the second launch finds the arrival counters as the first left them
            got = backend.attend(query, keys, values, batch, scaling, window, softcap, sinks)
            want = reference.attention(query, keys, values, batch, scaling, window, softcap, sinks)
            assert reference.relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 70])
def test_a_sink_counts_once_where_the_context_is_split(
    kernel_device: torch.device, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tritandem.engine.attention import paged

    heads = paged.Heads(4, 2, 64)
    monkeypatch.setattr(paged, "_multiprocessors", lambda device: 132)
    dtype = dtypes(kernel_device)[-1]
    query, keys, values, batch = random_batch([1, 300, 0, 130], [1] * 4, (4, 2, 64), dtype, kernel_device)
    backend = paged.PagedAttention([heads], 4, kernel_device)
    assert paged.choose_decode_tiles(4, heads, 132, query.element_size()).splits > 2
    sinks = torch.linspace(-2.0, 3.0, heads.query).to(kernel_device, dtype)
    for _ in range(2):
        got = backend.attend(query, keys, values, batch, 0.125, window, sink_logits=sinks)
        want = reference.attention(query, keys, values, batch, 0.125, window, sink_logits=sinks)
        assert reference.relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 2, 64), (32, 8, 128)])
@pytest.mark.parametrize("query_key_norm", [False, True])
@pytest.mark.parametrize("sink", [False, True])
def test_fused_decode_equals_rotate_then_store_then_attend(
    kernel_device: torch.device, heads: tuple[int, int, int], query_key_norm: bool, sink: bool
) -> None:
    from tritandem.engine.attention.paged import Heads, PagedAttention, RotaryQKV

    for dtype in dtypes(kernel_device):
        lengths = [1, 0, 17, 130, 200]
        _, keys, values, batch = random_batch(lengths, [1] * 5, heads, dtype, kernel_device)
        query_heads, kv_heads, dim = heads
        generator = torch.Generator().manual_seed(3)
        qkv = torch.randn(5, (query_heads + 2 * kv_heads) * dim, generator=generator).to(kernel_device, dtype)
        angles = torch.rand(256, dim // 2, generator=generator).repeat(1, 2).to(kernel_device)
        norms = [torch.rand(dim, generator=generator).to(kernel_device, dtype) for _ in range(2)]
        rotary = RotaryQKV(
            angles.cos().contiguous(),
            angles.sin().contiguous(),
            norms[0] if query_key_norm else None,
            norms[1] if query_key_norm else None,
            1e-6,
        )
        packed = qkv.view(5, query_heads + 2 * kv_heads, dim)
        q, k, v = packed.split([query_heads, kv_heads, kv_heads], dim=1)
        if query_key_norm:
            q, k = reference.rms_norm(q, norms[0], 1e-6), reference.rms_norm(k, norms[1], 1e-6)
        at = (batch.context_lens - 1).clamp_min(0).long()
        q, k = (reference.rotate(x, rotary.cos[at], rotary.sin[at]).to(dtype) for x in (q, k))
        want_keys, want_values = keys.clone(), values.clone()
        live = batch.context_lens > 0
        for cache, new in ((want_keys, k), (want_values, v)):
            cache.view(-1, kv_heads, dim)[batch.slot_mapping[live]] = new[live]
        sinks = torch.linspace(-2.0, 3.0, query_heads).to(kernel_device, dtype) if sink else None
        want = reference.attention(q, want_keys, want_values, batch, dim**-0.5, sink_logits=sinks)
        rows = torch.arange(5, dtype=torch.int32, device=kernel_device)
        backend = PagedAttention([Heads(*heads)], 5, kernel_device)
        got = backend.decode_fused(qkv, rotary, keys, values, batch, rows, dim**-0.5, sink_logits=sinks)
        assert reference.relative_error(got.view_as(want), want) < TOLERANCE[dtype]
        torch.testing.assert_close(keys, want_keys, equal_nan=True, atol=1e-2, rtol=1e-2)
        torch.testing.assert_close(values, want_values, equal_nan=True, atol=0, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(("splits", "least_tiles"), [(1, 1), (2, 3), (4, 2)])
def test_the_order_of_the_grid_and_the_least_part_change_no_result(
    kernel_device: torch.device, window: int | None, splits: int, least_tiles: int
) -> None:
    from tritandem.engine.attention.paged import DecodeTiles, Heads, PagedAttention

    dtype, lengths = dtypes(kernel_device)[-1], [1, 300, 0, 130]
    query, keys, values, batch = random_batch(lengths, [1] * 4, (4, 2, 64), dtype, kernel_device)
    want = reference.attention(query, keys, values, batch, 0.125, window)
    for heads_first in (False, True):
        tiles = DecodeTiles(32, splits, 2, 3, heads_first, least_tiles)
        backend = PagedAttention([Heads(4, 2, 64)], 4, kernel_device, lambda *sizes, tiles=tiles: tiles)
        for _ in range(2):
            got = backend.attend(query, keys, values, batch, 0.125, window)
            assert reference.relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["bf16", "fp8_e4m3"])
def test_every_way_of_the_benchmark_computes_attention(kernel_device: torch.device, kv: str) -> None:
    from tritandem.engine.attention.paged import Heads
    from tritandem_bench.attention import WAYS, check

    errors = check(WAYS, Heads(4, 2, 64), kv, kernel_device)
    assert all(error < TOLERANCE[torch.bfloat16] for error in errors.values()), errors


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4, 64), (9, 3, 64), (8, 2, 80), (32, 8, 128), (4, 1, 256)])
@pytest.mark.parametrize(("window", "sink"), [(None, False), (20, True)])
@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_an_fp8_cache_is_read_as_what_it_holds(
    kernel_device: torch.device, heads: tuple[int, int, int], window: int | None, sink: bool, kind: str
) -> None:
    from tritandem.engine.attention.paged import Heads, PagedAttention

    for dtype in dtypes(kernel_device):
        lengths = [1, 0, 17, 130, 64, 300] if kind == "decode" else [1, 17, 130, 64, 5]
        query_lens = [1] * len(lengths) if kind == "decode" else [1, 17, 37, 64, 3]
        query, keys, values, batch = random_batch(lengths, query_lens, heads, dtype, kernel_device)
        keys, values = (as_cached(cache, FP8) for cache in (keys, values))
        backend = PagedAttention([Heads(*heads)], len(lengths), kernel_device)
        sinks = torch.linspace(-2.0, 3.0, heads[0]).to(kernel_device, dtype) if sink else None
        for _ in range(2):
            got = backend.attend(query, keys, values, batch, heads[2] ** -0.5, window, None, sinks)
            want = reference.attention(query, keys, values, batch, heads[2] ** -0.5, window, None, sinks)
            assert reference.relative_error(got, want) < TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 2, 64), (32, 8, 128)])
def test_fused_decode_over_an_fp8_cache_equals_rotate_then_store_then_attend(
    kernel_device: torch.device, heads: tuple[int, int, int]
) -> None:
    from tritandem.engine.attention.paged import Heads, PagedAttention, RotaryQKV

    query_heads, kv_heads, dim = heads
    for dtype in dtypes(kernel_device):
        lengths = [1, 0, 17, 130, 200]
        _, keys, values, batch = random_batch(lengths, [1] * 5, heads, dtype, kernel_device)
        keys, values = (as_cached(cache, FP8) for cache in (keys, values))
        generator = torch.Generator().manual_seed(3)
        qkv = torch.randn(5, (query_heads + 2 * kv_heads) * dim, generator=generator).to(kernel_device, dtype)
        angles = torch.rand(256, dim // 2, generator=generator).repeat(1, 2).to(kernel_device)
        rotary = RotaryQKV(angles.cos().contiguous(), angles.sin().contiguous(), None, None, 1e-6)
        at = (batch.context_lens - 1).clamp_min(0).long()
        backend, rows = PagedAttention([Heads(*heads)], 5, kernel_device), torch.arange(5, device=kernel_device)
        apart_keys, apart_values = keys.clone(), values.clone()
        slots = batch.slot_mapping.masked_fill(batch.context_lens == 0, 0)
        query = backend.rotate_store(qkv.clone(), rotary, apart_keys, apart_values, at, slots)
        want = reference.attention(query, apart_keys, apart_values, batch, dim**-0.5)
        got = backend.decode_fused(qkv, rotary, keys, values, batch, rows.int(), dim**-0.5)
        assert reference.relative_error(got.view_as(want), want) < TOLERANCE[dtype]
        for ours, apart in ((keys, apart_keys), (values, apart_values)):  # the null block may hold anything
            torch.testing.assert_close(ours[1:].float(), apart[1:].float(), equal_nan=True, atol=0, rtol=0)


@pytest.mark.gpu
def test_what_fp8_cannot_hold_is_cut_to_its_range_and_nan_stays(cuda_device: torch.device) -> None:
    """Not under the interpreter, which rounds to FP8 without carrying and knows no NaN of it."""
    from tritandem.engine.attention.paged import Heads, PagedAttention

    for dtype in dtypes(cuda_device):
        backend = PagedAttention([Heads(2, 2, 64)], 4, cuda_device)
        _, keys, values, batch = random_batch([3, 3], [3, 3], (2, 2, 64), dtype, cuda_device)
        keys, values = (as_cached(cache, FP8) for cache in (keys, values))
        key, value = torch.randn(2, 6, 2, 64).to(cuda_device, dtype) * 300
        key[0, 0, :4] = torch.tensor([449.0, -1e4, 0.001, float("nan")])
        backend.store(key, value, keys, values, batch)
        for cache, new in ((keys, key), (values, value)):
            stored = cache.flatten(0, 1)[batch.slot_mapping].float()
            torch.testing.assert_close(stored, as_cached(new, FP8).float(), equal_nan=True, atol=0, rtol=0)
        assert keys.flatten(0, 1)[batch.slot_mapping[0], 0, :2].tolist() == [448.0, -448.0]


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1, 96, 40), (1, 2304, 24), (5, 128, 64), (20, 80, 33)])
def test_few_row_product_equals_norm_linear_gate_residual(
    kernel_device: torch.device, rows: int, inner: int, columns: int, gated: bool
) -> None:
    from tritandem.engine.model.linear.few_rows import LinearTiles, few_row_linear

    generator = torch.Generator().manual_seed(rows)
    for dtype in dtypes(kernel_device):

        def random(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(kernel_device, dtype)

        x, residual, bias = random(rows, inner), random(rows, columns), random(columns)
        weight = random((2 if gated else 1) * columns, inner)
        block_k = 512 if rows == 1 else 64
        tiles = LinearTiles(1 if rows == 1 else 16, 4 if rows == 1 else 16, block_k, warps=4, stages=2)
        normed = reference.rms_norm(x, torch.ones_like(x[0]), 1e-5)
        if gated:
            gate, up = (normed @ weight.float().T).chunk(2, dim=-1)
            want = gate * gate.sigmoid() * up
            got = few_row_linear(x, weight, tiles, norm_eps=1e-5, gated=True)
        else:
            want = normed @ weight.float().T + bias.float() + residual.float()
            got = few_row_linear(x, weight, tiles, norm_eps=1e-5, bias=bias, residual=residual)
        assert reference.relative_error(got, want) < TOLERANCE[dtype]
