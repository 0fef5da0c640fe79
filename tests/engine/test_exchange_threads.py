"""Ranks as threads of one process: what their exchange computes, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest
import torch
from tritandem.engine.parallel.interface import Exchange, RanksFailed, Sizes
from tritandem.engine.parallel.registry import make_exchanges, make_ranks

T = TypeVar("T")
SIZES = Sizes(rows=8, width=16, logit_rows=8, vocab_size=12, dtype=torch.float32)


def together(exchanges: list[Exchange], call: Callable[[Exchange], T]) -> list[T]:
    with ThreadPoolExecutor(len(exchanges)) as pool:
        return list(pool.map(call, exchanges))


@pytest.fixture(params=[2, 3])
def exchanges(request: pytest.FixtureRequest) -> list[Exchange]:
    return make_exchanges(make_ranks([torch.device("cpu")] * request.param), SIZES)


def test_sums_have_the_same_bits_on_every_rank(exchanges: list[Exchange]) -> None:
    torch.manual_seed(1)
    parts = [torch.randn(8, 16) for _ in exchanges]
    residual = torch.randn(8, 16)
    want = residual.double() + sum(part.double() for part in parts)

    def call(exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
        own = residual.clone()
        for _ in range(20):  # calls that follow at once do not meet the one before
            own = residual.clone()
            exchange.add_sum(parts[exchange.rank.index].clone(), own)
        given = parts[exchange.rank.index][None].clone()
        assert exchange.sum(given) is given
        return own, given

    results = together(exchanges, call)
    for own, summed in results:
        assert torch.equal(own, results[0][0])
        assert torch.equal(summed, results[0][1])
        torch.testing.assert_close(own.double(), want, rtol=1e-5, atol=1e-5)


def test_the_best_of_all_parts_is_the_one_with_the_lowest_id_and_what_is_no_number_wins(
    exchanges: list[Exchange],
) -> None:
    count = len(exchanges)
    values = torch.tensor(
        [[1.0, 5.0, float("nan")] if index == count - 1 else [1.0, 2.0, 9.0] for index in range(count)]
    )

    def call(exchange: Exchange) -> tuple[torch.Tensor, torch.Tensor]:
        index = exchange.rank.index
        return exchange.best(values[index], torch.arange(3) + 4 * index)

    for best, ids in together(exchanges, call):
        assert ids.tolist() == [0, 4 * (count - 1) + 1, 4 * (count - 1) + 2]
        assert best[:2].tolist() == [1.0, 5.0]
        assert best[2].isnan()


def test_gathered_columns_stand_in_the_order_of_ranks(exchanges: list[Exchange]) -> None:
    whole = torch.arange(2 * 12.0).view(2, 12)
    parts = whole.chunk(len(exchanges), dim=1)
    for got in together(exchanges, lambda exchange: exchange.gather_columns(parts[exchange.rank.index])):
        assert torch.equal(got, whole)


def test_a_rank_that_does_not_come_ends_the_patience_of_the_others(exchanges: list[Exchange]) -> None:
    exchanges[0].patience(0.05)
    with pytest.raises(RanksFailed, match=r"rank 0 waited 0\.05 s"):
        exchanges[0].sum(torch.zeros(1, 16))
    assert all(exchange.failed() == exchanges[0].failed() is not None for exchange in exchanges)
    with pytest.raises(RanksFailed, match="rank 0 waited"):  # and who comes later hears of it at once
        exchanges[1].sum(torch.zeros(1, 16))


def test_who_waits_hears_why_another_rank_gave_up(exchanges: list[Exchange]) -> None:
    def call(exchange: Exchange) -> str:
        if exchange.rank.index == 1:
            exchange.abort("rank 1: out of memory")
            return str(exchange.failed())
        with pytest.raises(RanksFailed) as raised:
            exchange.sum(torch.zeros(1, 16))
        return str(raised.value)

    assert set(together(exchanges, call)) == {"rank 1: out of memory"}
