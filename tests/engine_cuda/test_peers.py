"""What ranks say to each other through memory that each of them reads: sums, choices, gathers, and who does not come.

Rank by rank and stage by stage everywhere; all at once, with a stream each on one device, on CUDA.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tritandem.engine.parallel.interface import Rank, Sizes

pytestmark = pytest.mark.gpu

SIZES = Sizes(rows=300, width=48, logit_rows=64, vocab_size=96, dtype=torch.float32)
LARGE = Sizes(rows=2048, width=4096, logit_rows=256, vocab_size=128_256, dtype=torch.bfloat16)
CALLS = 64  # of one graph


def together(devices: Sequence[torch.device], sizes: Sizes = SIZES) -> list[Any]:
    from tritandem.engine.parallel.peers import PeerExchange  # needs the Triton language

    return list(PeerExchange.together([Rank(at, len(devices), device) for at, device in enumerate(devices)], sizes))


def stages() -> tuple[tuple[int, int], ...]:
    from tritandem.engine.parallel.peer_kernels import COMBINE, MIDDLE, SHOW

    return (SHOW, SHOW), (MIDDLE, MIDDLE), (COMBINE, COMBINE)


def randoms(devices: Sequence[torch.device], shape: Sequence[int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(device, dtype) for device in devices]


def plain_sum(parts: Sequence[torch.Tensor], residual: torch.Tensor | None = None, rounded: bool = False) -> Any:
    """float32 in the order of ranks, on the first one's device; `rounded` before the residual comes to it."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.to(total.device).float()
    if rounded:
        total = total.to(parts[0].dtype).float()
    return (total if residual is None else total + residual.to(total.device).float()).to(parts[0].dtype)


# -- rank by rank --------------------------------------------------------------------------------------


@pytest.fixture
def one_by_one(kernel_device: torch.device) -> torch.device:
    """Where ranks cannot run all at once; where they can, every stage of every kind would only be compiled apart."""
    if kernel_device.type == "cuda":
        pytest.skip("here they run all at once")
    return kernel_device


@pytest.mark.parametrize("two_shot", [False, True])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_that_run_one_after_the_other_get_the_sum(one_by_one: torch.device, ranks: int, two_shot: bool) -> None:
    devices, rng = [one_by_one] * ranks, random.Random(ranks)
    group = together(devices)
    for call in range(8):
        # The interpreter cuts bfloat16 off instead of rounding it.
        dtype, shape = rng.choice((torch.float32, torch.float16)), (rng.choice((1, 7, 64, SIZES.rows)), SIZES.width)
        parts = [part.view(-1) for part in randoms(devices, shape, dtype, call)]
        residual = randoms(devices[:1], shape, dtype, 99)[0].view(-1) if call % 2 else None
        outs = [torch.empty_like(part) for part in parts]
        for stage in stages():
            for exchange, part, out in zip(group, parts, outs, strict=True):
                exchange.sum_stages(part, residual, out, stage, two_shot)
        for out in outs:
            assert torch.equal(out, plain_sum(parts, residual, two_shot))
    assert group[0].failed() is None


def test_columns_stand_beside_each_other_in_the_order_of_ranks(one_by_one: torch.device) -> None:
    devices = [one_by_one] * 3
    group = together(devices)
    for rows, columns in ((1, 32), (5, 33), (64, 22), (24, 66)):
        parts = randoms(devices, (rows, columns), torch.float32, rows)
        outs = [part.new_empty(rows, 3 * columns) for part in parts]
        for stage in stages():
            for exchange, part, out in zip(group, parts, outs, strict=True):
                exchange.gather_stages(part, out, stage)
        assert all(torch.equal(out, torch.cat(parts, dim=1)) for out in outs)


def test_the_best_is_the_largest_and_of_equals_the_lowest_id(one_by_one: torch.device) -> None:
    nan, inf = float("nan"), float("inf")
    values = torch.tensor([[1.0, 2.0, 3.0, nan, nan, -inf, inf], [1.0, 5.0, 2.0, inf, nan, -inf, nan]])
    ids = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [103, 104, 105, 106, 107, 108, 2_000_000_000]])
    group = together([one_by_one] * 2)
    given = [(values[rank].to(one_by_one), ids[rank].to(one_by_one)) for rank in range(2)]
    found = [(torch.empty_like(value), torch.empty_like(index)) for value, index in given]
    for stage in stages():
        for exchange, best, out in zip(group, given, found, strict=True):
            exchange.best_stages(best, out, stage)
    want = values.max(dim=0)
    for top, index in found:
        assert torch.equal(top.cpu().nan_to_num(-7), want.values.nan_to_num(-7))
        assert index.tolist() == [3, 104, 5, 6, 7, 8, 2_000_000_000]


def test_a_rank_that_does_not_come_is_named_and_later_calls_do_not_wait(kernel_device: torch.device) -> None:
    group = together([kernel_device] * 3)
    part = torch.ones((4, SIZES.width), device=kernel_device)
    group[0].patience(0.2 if kernel_device.type == "cuda" else 3)
    group[1].sum_stages(part.view(-1), None, torch.empty_like(part).view(-1), stages()[0], False)
    began = time.monotonic()
    for _ in range(CALLS):
        group[0].sum(part.clone())
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()
    assert time.monotonic() - began < 0.2 * CALLS / 2
    assert "rank 2" in group[0].failed()
    assert all(exchange.failed() == group[0].failed() for exchange in group)
    assert float((part + part).sum()) == 2 * part.numel()  # the device goes on


def test_a_host_that_gives_up_is_heard_by_whoever_waits(kernel_device: torch.device) -> None:
    """Without a clock, patience of so many polls would last for hours."""
    group = together([kernel_device] * 2)
    part = torch.ones((4, SIZES.width), device=kernel_device)
    group[0].patience(0)  # a rehearsal: compiled and loaded before anybody waits
    group[0].sum(part.clone())
    assert group[0].failed() is None
    group[0].patience(600 if kernel_device.type == "cuda" else 10**9)
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()
        assert group[0].failed() is None
        group[0].sum(part)
    group[1].abort("enough")
    if kernel_device.type == "cuda":
        torch.cuda.synchronize()
    else:
        group[0].sum(part)
    assert group[0].failed() == group[1].failed() == "enough"


def test_the_size_rule_takes_the_second_wait_where_bytes_outweigh_it() -> None:
    peers = pytest.importorskip("tritandem.engine.parallel.peers", reason="needs the triton package")
    assert not any(peers.two_shot_pays(2, size) for size in (1, 1 << 20, 1 << 30))  # as many bytes either way
    assert not peers.two_shot_pays(4, 64 * 4096 * 2)
    assert peers.two_shot_pays(4, 2048 * 4096 * 2)
    assert peers.two_shot_pays(8, 64 * 4096 * 2)


# -- all at once ---------------------------------------------------------------------------------------


def all_devices(ranks: int) -> list[torch.device]:
    """A device each where there are enough, else one for all."""
    there = torch.cuda.device_count()
    return [torch.device("cuda", rank if there >= ranks else 0) for rank in range(ranks)]


def for_each(devices: Sequence[torch.device], streams: Sequence[Any], call: Callable[[int], object]) -> None:
    for rank, (device, stream) in enumerate(zip(devices, streams, strict=True)):
        with torch.cuda.device(device), torch.cuda.stream(stream):
            call(rank)


def finish(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


@pytest.mark.usefixtures("cuda_device")
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_at_once_over_random_shapes(ranks: int) -> None:
    devices, rng = all_devices(ranks), random.Random(ranks)
    group, streams = together(devices, LARGE), [torch.cuda.Stream(device) for device in devices]
    for exchange in group:
        exchange.patience(8)
    shapes = [(1, 4096), (384, 4096), (2048, 4096), (5000, 4096)]
    shapes += [(rng.randint(1, 384), rng.choice((576, 2048, 4096, 8192))) for _ in range(16)]
    for number, shape in enumerate(shapes):
        # Each kind, block and type is compiled: of others than the engine's a few are enough.
        dtype = [torch.bfloat16, torch.float32, torch.float16][
            max(0, number - 3) % 3 if number < 6 and ranks == 2 else 0
        ]
        parts, residual = randoms(devices, shape, dtype, number), randoms(devices[:1], shape, dtype, 99)[0]
        sums, shown = [part.clone() for part in parts], [part.clone() for part in parts]
        residuals = [residual.to(device, copy=True) for device in devices]
        finish(devices)
        for_each(devices, streams, lambda rank: group[rank].sum(sums[rank]))  # noqa: B023
        for_each(devices, streams, lambda rank: group[rank].add_sum(shown[rank], residuals[rank]))  # noqa: B023
        finish(devices)
        assert group[0].failed() is None
        assert all(torch.equal(total.to(devices[0]), plain_sum(parts)) for total in sums)
        wants = [plain_sum(parts, residual, rounded) for rounded in (False, True)]
        first = residuals[0]
        assert any(torch.equal(first, want) for want in wants) or shape[0] > 2048  # in pieces, of either kind
        assert all(torch.equal(other.to(devices[0]), first) for other in residuals)
        torch.testing.assert_close(first, wants[0], rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("cuda_device")
def test_all_at_once_choices_and_columns() -> None:
    devices = all_devices(2)
    group, streams = together(devices, LARGE), [torch.cuda.Stream(device) for device in devices]
    for exchange in group:
        exchange.patience(8)
    for rows in (1, 17, 256):
        logits = randoms(devices, (rows, 64_128), torch.bfloat16, rows)
        found: list[Any] = [None, None]
        best = [part.float().max(dim=1) for part in logits]
        finish(devices)

        def call(rank: int) -> None:
            ids = best[rank].indices + rank * 64_128  # noqa: B023
            chosen = group[rank].best(best[rank].values, ids)  # noqa: B023
            found[rank] = (*chosen, group[rank].gather_columns(logits[rank]))  # noqa: B023

        for seconds in (0, 8):  # a rehearsal first: whoever waits must not keep others from memory or kernels
            for_each(devices, streams, lambda rank: group[rank].patience(seconds))  # noqa: B023
            finish(devices)
            for_each(devices, streams, call)
            finish(devices)
        whole = torch.cat([part.to(devices[0]) for part in logits], dim=1)
        for values, ids, columns in found:
            assert torch.equal(columns.to(devices[0]), whole)
            assert torch.equal(values.to(devices[0]), whole.float().max(dim=1).values)
            assert torch.equal(ids.to(devices[0]), whole.float().max(dim=1).indices)
    assert group[0].failed() is None


def captured(devices: Sequence[torch.device], streams: Sequence[Any], call: Callable[[int, int], None]) -> list[Any]:
    """A graph a rank, of CALLS calls."""
    graphs: list[Any] = []
    for rank, (device, stream) in enumerate(zip(devices, streams, strict=True)):
        with torch.cuda.device(device):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                for number in range(CALLS):
                    call(rank, number)
            graphs.append(graph)
    return graphs


@pytest.mark.usefixtures("cuda_device")
@pytest.mark.parametrize(("ranks", "rows", "two_shot"), [(2, 1, False), (2, 64, False), (3, 64, True), (4, 8, False)])
def test_replays_go_on_where_the_last_one_ended(ranks: int, rows: int, two_shot: bool) -> None:
    """Inputs take turns by three, halves by two: what a rank reads too early or too late is another call's."""
    devices = all_devices(ranks)
    group, streams = together(devices, LARGE), [torch.cuda.Stream(device) for device in devices]
    for exchange in group:
        exchange.patience(8)
    parts = [[part.view(-1) for part in randoms(devices, (rows, 4096), torch.bfloat16, seed)] for seed in range(3)]
    outs = [[torch.zeros_like(parts[0][rank]) for _ in range(CALLS)] for rank in range(ranks)]
    all_stages = (stages()[0][0], stages()[-1][-1])

    def call(rank: int, number: int) -> None:
        group[rank].sum_stages(parts[number % 3][rank], None, outs[rank][number], all_stages, two_shot)

    finish(devices)
    for_each(devices, streams, lambda rank: call(rank, 0))
    finish(devices)
    graphs = captured(devices, streams, call)
    wants = [plain_sum(turn) for turn in parts]
    for _ in range(10):
        for _ in range(200):
            for_each(devices, streams, lambda rank: graphs[rank].replay())
        finish(devices)
        assert group[0].failed() is None
        for rank in range(ranks):
            for number, out in enumerate(outs[rank]):
                assert torch.equal(out.to(devices[0]), wants[number % 3]), (rank, number)
                out.zero_()
        finish(devices)


@pytest.mark.usefixtures("cuda_device")
def test_the_vendor_s_library_gives_the_same_sum() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a device a rank")
    from torch.cuda import nccl

    devices = all_devices(2)
    group, streams = together(devices, LARGE), [torch.cuda.Stream(device) for device in devices]
    for rows in (1, 64, 2048):
        parts = randoms(devices, (rows, 4096), torch.bfloat16, rows)
        twins = [part.clone() for part in parts]
        finish(devices)
        for_each(devices, streams, lambda rank: group[rank].sum(parts[rank]))  # noqa: B023
        finish(devices)
        nccl.all_reduce(twins)
        finish(devices)
        assert all(torch.equal(part, twin) for part, twin in zip(parts, twins, strict=True))  # two terms: one rounding
