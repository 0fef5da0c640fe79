"""Claims about which engine gets a request, and when it should wait here rather than there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tritandem.contracts.errors import Saturated, TritandemError
from tritandem.contracts.requests import EngineRequest, PriorityClass
from tritandem.contracts.stream import LoadSnapshot
from tritandem.scheduler.batch_limits import BatchLimits
from tritandem.scheduler.dispatch import Demand, EngineView, choose, has_room
from tritandem.scheduler.prefix_map import MAX_REMEMBERED, PIECE_TOKENS, PrefixMap, prefix_hashes

from tests.fakes.engine_port import FakeEngine, answer_tokens
from tests.fakes.scheduling import Start, request, wait_until
from tests.fakes.sinks import RecordingSink
from tests.fakes.text_streams import text_of

LOAD = LoadSnapshot(total_blocks=100, free_blocks=100, block_tokens=16, max_sequences=16, prefill_token_ns=1000)
VIEW = EngineView(LOAD, BatchLimits(16, 500), sequences=4, committed_tokens=400, prefilling_tokens=0)
DEMAND = Demand(prompt_tokens=100, expected_tokens=200)


def test_an_engine_is_filled_to_its_batch_and_a_little_beyond() -> None:
    assert has_room(replace(VIEW, sequences=16), DEMAND), "one waits there for a place that falls free"
    assert not has_room(replace(VIEW, sequences=17), DEMAND)


def test_prompts_on_their_way_are_bounded_but_one_of_any_length_passes() -> None:
    assert has_room(replace(VIEW, prefilling_tokens=400), DEMAND)
    assert not has_room(replace(VIEW, prefilling_tokens=401), DEMAND)
    assert has_room(VIEW, Demand(prompt_tokens=1000, expected_tokens=1100))


def test_only_what_must_be_computed_of_a_prompt_counts_as_on_its_way() -> None:
    nearly_full = replace(VIEW, prefilling_tokens=450)
    assert not has_room(nearly_full, DEMAND, cached_tokens=0)
    assert has_room(nearly_full, DEMAND, cached_tokens=64)


def test_expected_tokens_stay_within_the_kv_cache() -> None:
    assert has_room(replace(VIEW, committed_tokens=1400), DEMAND)
    assert not has_room(replace(VIEW, committed_tokens=1401), DEMAND)


def test_free_blocks_must_hold_the_prompts_on_their_way_too() -> None:
    nearly_full = replace(VIEW, load=replace(LOAD, free_blocks=10))
    assert has_room(nearly_full, DEMAND)
    assert not has_room(replace(nearly_full, prefilling_tokens=61), DEMAND)


def test_an_idle_engine_takes_anything() -> None:
    assert has_room(EngineView(replace(LOAD, free_blocks=0), BatchLimits(0, 0)), Demand(10**6, 10**6))


def test_the_least_loaded_engine_gets_it_and_a_cached_prefix_outweighs_a_little_load() -> None:
    busy, quiet = replace(VIEW, prefilling_tokens=300), replace(VIEW, prefilling_tokens=250)
    assert choose([busy, quiet], DEMAND, [0, 0]) == 1
    assert choose([busy, quiet], DEMAND, [64, 0]) == 0
    assert choose([replace(busy, prefilling_tokens=401), quiet], DEMAND, [64, 0]) == 1
    assert choose([replace(VIEW, sequences=17)], DEMAND, [0]) is None
    assert choose([], DEMAND, []) is None


def test_equal_engines_share_by_sequences() -> None:
    idle = LoadSnapshot(max_sequences=16)
    more, fewer = EngineView(idle, BatchLimits(16, 500), 3), EngineView(idle, BatchLimits(16, 500), 2)
    assert choose([more, fewer], DEMAND, [0, 0]) == 1


def test_prefixes_are_found_to_the_piece_and_oldest_are_forgotten_first() -> None:
    prefixes, ids = PrefixMap(), np.arange(10 * PIECE_TOKENS + 1, dtype=np.int32)
    prefixes.remember(prefix_hashes(ids, 0))
    assert prefixes.cached_tokens(prefix_hashes(ids, 0)) == 10 * PIECE_TOKENS
    changed = ids.copy()
    changed[3 * PIECE_TOKENS] = -1
    assert prefixes.cached_tokens(prefix_hashes(changed, 0)) == 3 * PIECE_TOKENS
    assert prefixes.cached_tokens(prefix_hashes(ids[: 5 * PIECE_TOKENS], 0)) == 4 * PIECE_TOKENS, (
        "the last id is computed"
    )
    for i in range(MAX_REMEMBERED // 10 + 1):
        prefixes.remember(prefix_hashes(ids + 1000 * (i + 1), 0))
    assert prefixes.cached_tokens(prefix_hashes(ids, 0)) == 0


def test_prefixes_of_another_salt_are_strangers() -> None:
    prefixes, ids = PrefixMap(), np.arange(3 * PIECE_TOKENS + 1, dtype=np.int32)
    prefixes.remember(prefix_hashes(ids, 5))
    assert [prefixes.cached_tokens(prefix_hashes(ids, salt)) for salt in (5, 0, 6)] == [3 * PIECE_TOKENS, 0, 0]


@pytest.mark.parametrize("scope", ["tenant", "shared"])
def test_cached_prefixes_are_shared_within_a_tenant_only_unless_the_operator_says_otherwise(
    start: Start, scope: str
) -> None:
    engine = FakeEngine()
    running, salts = start([engine], prefix_cache_scope=scope), []
    for i, tenant in enumerate(("", "a", "b", "a", "\ud83d", "")):
        running.service.submit(request(i + 1, max_tokens=1, tenant=tenant), sink := RecordingSink())
        sink.wait_end()
        salts.append(engine.submits[-1][0].prefix_salt)
    if scope == "shared":
        assert salts == [0] * 6
    else:
        assert (salts[0], salts[5]) == (0, 0)
        assert salts[1] == salts[3]
        assert len(set(salts)) == 4


def test_requests_of_one_tick_travel_in_one_submit_and_a_lone_one_at_once(start: Start) -> None:
    engine = FakeEngine()
    running = start([engine], tick_s=1.0)  # long beside any pause of this thread
    sinks = [RecordingSink() for _ in range(9)]
    running.service.submit(request(1), sinks[0])
    sinks[0].wait_end()
    for i, sink in enumerate(sinks[1:]):
        running.service.submit(request(i + 2), sink)
    for sink in sinks:
        sink.wait_end()
    assert [len(submit) for submit in engine.submits] == [1, 8]


def test_what_waits_here_is_still_ordered_when_a_place_falls_free(start: Start) -> None:
    engine = FakeEngine(automatic=False, load=LoadSnapshot(max_sequences=1, max_context_tokens=999))
    running = start([engine])
    sinks = {first_id: RecordingSink() for first_id in (1, 2, 3, 4)}
    running.service.submit(request(1), sinks[1])
    running.service.submit(request(2), sinks[2])
    running_ids = engine.wait_live(2)
    running.service.submit(request(3, priority=PriorityClass.BATCH), sinks[3])
    wait_until(lambda: running.service.snapshot().waiting[PriorityClass.BATCH] == 1)
    running.service.submit(request(4, priority=PriorityClass.INTERACTIVE), sinks[4])
    wait_until(lambda: running.service.snapshot().waiting[PriorityClass.INTERACTIVE] == 1)
    finish(engine, running_ids[0])
    wait_until(lambda: len(engine.submits) == 2 or len(engine.submits) == 3)
    assert int(engine.submits[-1][0].prompt_ids[0]) == 4
    while (ids := engine.live_ids()) or not all(sink.ends for sink in sinks.values()):
        for seq_id in ids:
            finish(engine, seq_id)
        wait_until(lambda: bool(engine.live_ids()) or all(sink.ends for sink in sinks.values()))


def finish(engine: FakeEngine, seq_id: int) -> None:
    from tritandem.contracts.stream import FinishCode

    engine.emit([(seq_id, [1], FinishCode.LENGTH)])


def test_an_engine_that_says_it_is_full_gets_the_request_again_later(start: Start) -> None:
    refusals = iter([True, True, False])

    def refuse(_: EngineRequest) -> TritandemError | None:
        return Saturated("full", 0.1) if next(refusals) else None

    engine, sink = FakeEngine(refuse=refuse), RecordingSink()
    running = start([engine])
    running.service.submit(request(5, max_tokens=3), sink)
    sink.wait_end()
    assert sink.text == text_of(answer_tokens(5, 3))
    assert len(engine.submits) == 3


def test_two_engines_share_the_load(start: Start) -> None:
    engines = [FakeEngine("a", automatic=False), FakeEngine("b", automatic=False)]
    running = start(engines)
    wait_until(lambda: all(engine.health == "up" for engine in running.service.snapshot().engines))
    sinks = [RecordingSink() for _ in range(10)]
    for i, sink in enumerate(sinks):
        running.service.submit(request(i + 1), sink)
    for engine in engines:
        for seq_id in engine.wait_live(5):
            finish(engine, seq_id)
    for sink in sinks:
        sink.wait_end()
