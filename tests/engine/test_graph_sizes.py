"""What is captured before the engine is ready serves every step, what is wanted comes next, and at the end every step
has the graph that fits it best. No device."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from tritandem.engine.runners.graph_sizes import DRAWN, GraphSizes, capture_first
from tritandem.engine.runners.pass_size import (
    ChoiceSize,
    DecodeSize,
    GraphSize,
    PassSize,
    batch_buckets,
    cheapest,
    efficient_tokens,
    row_buckets,
    token_buckets,
)
from tritandem.engine.step import GREEDY, PrefillChunk, SamplingFeatures

SAMPLED = SamplingFeatures(frozenset({"sampled"}))
PENALISED = SamplingFeatures(frozenset({"penalised"}))
ROWS, TOKENS = 256, 2304


def cost_ms(size: GraphSize) -> float | None:
    """As on a device whose products are slow at one height."""
    if isinstance(size, PassSize):
        return 4.0 + (size.rows + size.tokens) / 50 + 6.0 * (size.tokens == 448)
    return 3.0 + size.rows / 100 if size == DecodeSize(size.rows, GREEDY) else None


def capture(sizes: GraphSizes, size: GraphSize) -> None:
    sizes.captured(size, cost_ms(size))


def ready(max_rows: int = ROWS, max_tokens: int = TOKENS, everything: bool = False) -> GraphSizes:
    sizes = GraphSizes(max_rows, max_tokens, captures=True)
    capture_first(sizes, lambda size: capture(sizes, size), everything, lambda note: None)
    return sizes


def chunks(*tokens: int) -> list[PrefillChunk]:
    return [PrefillChunk(slot, 0, np.zeros(count, np.int32), True) for slot, count in enumerate(tokens)]


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(256, 2304), (8, 48), (1, 32), (3, 2048), (100, 0)])
def test_before_it_is_ready_something_holds_every_step(max_rows: int, max_tokens: int) -> None:
    sizes = ready(max_rows, max_tokens)
    first = sizes.first()
    assert len(set(first)) == len(first) <= 45
    for rows in range(1, max_rows + 1):
        for asked, taken in ((GREEDY, GREEDY), (DRAWN, DRAWN), (SAMPLED, DRAWN)):
            step = sizes.decode(rows, asked)
            assert step in first
            assert step.rows >= rows
            assert step.features == taken
    for rows, tokens in itertools.product((0, 1, max_rows // 2, max_rows), (1, max_tokens // 3, max_tokens)):
        if tokens and max_tokens:
            size = sizes.carrying(rows, chunks(tokens))
            assert size in first
            assert size is not None
            assert size.tokens >= tokens
            assert size.rows >= rows or size.rows == 0


def test_a_single_request_takes_no_larger_graph_than_it_ever_will() -> None:
    """The first request right after the start is as fast as later ones."""
    early, late = ready(), ready(everything=True)
    assert early.decode(1, GREEDY) == late.decode(1, GREEDY) == DecodeSize(1, GREEDY)
    for tokens in range(1, 513):
        assert early.carrying(0, chunks(tokens)) == late.carrying(0, chunks(tokens))


def test_the_largest_comes_first_so_that_the_others_reuse_its_memory() -> None:
    first = ready().first()
    assert first[0] == PassSize(ROWS, TOKENS)
    steps = [size.rows for size in first if isinstance(size, DecodeSize) and size.features == GREEDY]
    assert steps == sorted(steps, reverse=True)


def test_in_idle_moments_everything_is_captured_once_the_most_wanted_first() -> None:
    sizes = ready()
    for _ in range(3):
        sizes.decode(200, GREEDY)
        sizes.decode(3, PENALISED)
    sizes.decode(100, GREEDY)
    sizes.carrying(30, chunks(300))
    choice = ChoiceSize(0, 4, SAMPLED)
    seen: list[GraphSize] = []
    while (size := sizes.next({choice: 7})) is not None:
        seen.append(size)
        capture(sizes, size)
    assert seen[0] == choice
    assert set(seen[1:3]) == {DecodeSize(224, GREEDY), DecodeSize(4, PENALISED)}
    assert set(seen[3:5]) == {DecodeSize(112, GREEDY), PassSize(32, 320)}
    assert len(set(seen)) == len(seen)
    every = {DecodeSize(rows, GREEDY) for rows in batch_buckets(ROWS)}
    every |= {PassSize(rows, tokens) for rows in row_buckets(ROWS) for tokens in token_buckets(TOKENS)}
    assert every <= {*seen, *sizes.first()}
    assert sizes.unasked() == []


def test_at_the_end_every_step_takes_what_it_took_when_all_was_measured_at_the_start() -> None:
    sizes, rng = ready(), random.Random(4)
    while (size := sizes.next({})) is not None:
        capture(sizes, size)
    costs = {
        PassSize(rows, tokens): cost_ms(PassSize(rows, tokens)) or 0.0
        for rows in row_buckets(ROWS)
        for tokens in token_buckets(TOKENS)
    }
    choices = cheapest(costs, sizes.step_ms)
    for _ in range(300):
        rows, tokens = rng.randrange(ROWS + 1), rng.randrange(1, TOKENS + 1)
        smallest = PassSize(
            next(size for size in row_buckets(ROWS) if size >= rows),
            next(size for size in token_buckets(TOKENS) if size >= tokens),
        )
        assert sizes.carrying(rows, chunks(tokens)) == choices[smallest]
        bucket = next(size for size in batch_buckets(ROWS) if size >= max(rows, 1))
        assert sizes.decode(max(rows, 1), GREEDY) == DecodeSize(bucket, GREEDY)
    assert sizes.efficient_tokens() == efficient_tokens(costs, sizes.step_ms)
    assert sizes.pass_tokens() == tuple(token_buckets(TOKENS))


def test_what_cannot_be_captured_is_not_tried_again_and_others_stand_in() -> None:
    sizes = ready()
    sizes.decode(200, GREEDY)
    size = sizes.next({})
    assert size == DecodeSize(224, GREEDY)
    sizes.refused(size)
    sizes.decode(200, GREEDY)
    assert sizes.next({size: 9}) != size
    assert sizes.decode(200, GREEDY) == DecodeSize(256, GREEDY)


def test_without_graphs_steps_run_at_their_own_size() -> None:
    sizes = GraphSizes(ROWS, TOKENS, captures=False)
    assert sizes.first() == []
    assert sizes.decode(3, SAMPLED) == DecodeSize(4, SAMPLED)
    assert sizes.carrying(0, chunks(20)) is None
    assert sizes.next({DecodeSize(4, SAMPLED): 3}) is None


def test_progress_says_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from tritandem.engine.runners import graph_sizes

    now_s, notes = itertools.count(), []
    monkeypatch.setattr(graph_sizes.time, "monotonic", lambda: float(next(now_s)))
    sizes = GraphSizes(24, 48, captures=True)
    capture_first(sizes, lambda size: capture(sizes, size), False, notes.append)
    count = len(sizes.first())
    assert notes[0].startswith(f"graphs: 1 of {count} captured, about ")
    assert notes[0].endswith(" s left")
    assert f"{count} graphs took" in notes[-1]
    assert f"{len(sizes.unasked())} more are captured in idle moments" in notes[-1]
