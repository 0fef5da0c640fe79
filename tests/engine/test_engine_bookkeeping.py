"""Whatever comes and goes in whatever order: every token is right, every sequence ends once, every block comes back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode
from tritandem.engine.host.kv_blocks import chain_hash, root_hash
from tritandem.engine.host.sequence import SequenceState
from tritandem.engine.step import StepPlan

from tests.engine.engine_rig import Rig
from tests.fakes.arithmetic_runner import VOCAB, ArithmeticRunner, expected_output


def make_request(seq_id: int, ids: list[int], max_tokens: int, stop_ids: tuple[int, ...] = ()) -> EngineRequest:
    return EngineRequest(seq_id, np.asarray(ids, np.int32), SamplingParams(max_tokens=max_tokens), stop_ids)


@pytest.mark.parametrize(("ahead", "prefix_cache"), [(0, True), (1, False), (3, True)])
def test_a_thousand_random_admissions_cancellations_and_preemptions(ahead: int, prefix_cache: bool) -> None:
    rng = np.random.default_rng(ahead)
    rig = Rig(ArithmeticRunner(num_slots=5, num_blocks=22, launch_ahead_steps=ahead), prefix_cache)
    requests: dict[int, EngineRequest] = {}
    cancelled: set[int] = set()
    common = rng.integers(0, VOCAB, 14).tolist()
    while len(requests) < 1000 or not rig.core.idle():
        if len(requests) < 1000 and rng.random() < 0.5 and len(rig.core.waiting) < 20:
            head = common[: rng.integers(0, 15)] if rng.random() < 0.5 else []
            ids = [*head, *rng.integers(0, VOCAB, rng.integers(1, 24)).tolist()]
            stop_ids = tuple(rng.integers(0, VOCAB, 16).tolist())
            new = make_request(len(requests), ids, int(rng.integers(1, 24)), stop_ids)
            requests[new.seq_id] = new
            rig.add(new)
        if rng.random() < 0.1 and rig.core.live_ids():
            victim = int(rng.choice(rig.core.live_ids()))
            cancelled.add(victim)
            rig.core.cancel([victim])
        rig.step()
    rig.read()
    load = rig.core.load()
    assert load.free_blocks == load.total_blocks
    assert sorted(rig.answers) == sorted(requests)
    for seq_id, request in requests.items():
        answer = rig.answers[seq_id]
        right = expected_output(request.prompt_ids.tolist(), request.sampling.max_tokens, request.stop_ids)
        if answer.finish == FinishCode.CANCELLED:
            assert seq_id in cancelled
            assert answer.tokens == right[: len(answer.tokens)]
        else:
            assert answer.tokens == right
            stopped = right[-1] in request.stop_ids
            assert answer.finish == (FinishCode.STOP if stopped else FinishCode.LENGTH)
    assert load.preemptions > 20
    assert bool(load.prefix_hit_tokens) == prefix_cache
    assert load.prefix_hit_tokens < load.prompt_tokens, "a sequence that was resumed counts once"
    assert 50 < len(cancelled) < 500


@pytest.mark.parametrize(("ahead", "prefix_cache"), [(0, False), (1, True), (3, False)])
def test_three_hundred_random_families_give_every_block_back(ahead: int, prefix_cache: bool) -> None:
    """Each has one prompt; some are cancelled, some preempted, before or after the others took their blocks."""
    rng = np.random.default_rng(ahead)
    rig = Rig(ArithmeticRunner(num_slots=5, num_blocks=24, launch_ahead_steps=ahead), prefix_cache)
    requests: dict[int, EngineRequest] = {}
    cancelled: set[int] = set()
    families = 0
    while families < 300 or not rig.core.idle():
        if families < 300 and rng.random() < 0.3 and len(rig.core.waiting) < 20:
            families += 1
            ids = rng.integers(0, VOCAB, rng.integers(1, 30)).tolist()
            for _ in range(int(rng.integers(1, 7))):
                new = make_request(len(requests), ids, int(rng.integers(1, 24)))
                requests[new.seq_id] = replace(new, family=families)
                rig.add(requests[new.seq_id])
        if rng.random() < 0.1 and rig.core.live_ids():
            victim = int(rng.choice(rig.core.live_ids()))
            cancelled.add(victim)
            rig.core.cancel([victim])
        rig.step()
    rig.read()
    load = rig.core.load()
    assert load.free_blocks == load.total_blocks
    assert sorted(rig.answers) == sorted(requests)
    for seq_id, request in requests.items():
        answer, right = rig.answers[seq_id], expected_output(request.prompt_ids.tolist(), request.sampling.max_tokens)
        if answer.finish == FinishCode.CANCELLED:
            assert seq_id in cancelled
            right = right[: len(answer.tokens)]
        assert answer.tokens == right
    assert load.preemptions > 20
    assert load.prefix_hit_tokens > 0
    assert not rig.core.residency._families


@pytest.mark.parametrize("prompt_tokens", [1, 4, 5, 11, 13])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_prompt_of_a_family_is_computed_once(prompt_tokens: int, prefix_cache: bool) -> None:
    runner = ArithmeticRunner(num_slots=8, num_blocks=60)
    launch, computed, copies = runner.launch, [], []

    def watched(plan: StepPlan) -> None:
        computed.extend(len(chunk.ids) for chunk in plan.prefill)
        copies.extend(plan.copies)
        launch(plan)

    runner.launch = watched  # type: ignore[method-assign]
    ids = list(range(prompt_tokens))
    family = [replace(make_request(i, ids, 20), family=1) for i in range(4)]
    answers = Rig(runner, prefix_cache).run(family)
    assert all(answer.tokens == expected_output(ids, 20) for answer in answers.values())
    assert sum(computed) == prompt_tokens + 3, "of the others, one token each"
    assert len(copies) == (3 if (prompt_tokens - 1) % 4 else 0), "where the last block begins before the last token"
    assert [answers[i].cached_tokens for i in range(4)] == [0, *[prompt_tokens - 1] * 3]


def test_without_its_first_one_a_family_goes_on() -> None:
    rig = Rig(ArithmeticRunner(num_slots=8, num_blocks=60, prefill_tokens=8), prefix_cache=False)
    ids = list(range(30))
    rig.add(*(replace(make_request(i, ids, 9), family=1) for i in range(3)))
    rig.step()
    rig.core.cancel([0])
    answers = rig.run([])
    assert [answers[i].tokens for i in (1, 2)] == [expected_output(ids, 9)] * 2
    assert answers[2].cached_tokens == 29, "of the second, which then was the first"


def test_sequences_that_fill_the_whole_pool_take_turns() -> None:
    rig = Rig(ArithmeticRunner(num_slots=4, num_blocks=9))
    batch = [make_request(i, [i] * 8, 24) for i in range(4)]
    answers = rig.run(batch)
    for request in batch:
        assert answers[request.seq_id].tokens == expected_output(request.prompt_ids.tolist(), 24)


def test_a_prompt_that_is_cached_to_its_last_block_still_computes_one_token() -> None:
    rig = Rig(ArithmeticRunner(num_slots=1, num_blocks=20))
    prompt = list(range(16))
    rig.run([make_request(0, prompt, 3)])
    answer = rig.run([make_request(1, prompt, 3)])[1]
    assert answer.cached_tokens == 12
    assert answer.tokens == expected_output(prompt, 3)


def test_a_prefix_of_another_salt_is_not_found() -> None:
    rig = Rig(ArithmeticRunner(num_slots=1, num_blocks=40))
    prompt = list(range(16))
    salts = [0, 7, 7, -7, 0]
    requests = [replace(make_request(i, prompt, 3), prefix_salt=salt) for i, salt in enumerate(salts)]
    answers = [rig.run([request])[request.seq_id] for request in requests]
    assert [answer.cached_tokens for answer in answers] == [0, 0, 12, 0, 12]
    assert all(answer.tokens == expected_output(prompt, 3) for answer in answers)


def test_block_names_do_not_depend_on_when_they_are_asked_for() -> None:
    request = EngineRequest(1, np.arange(10, dtype=np.int32), SamplingParams(max_tokens=20))

    def sequence(outputs: int) -> SequenceState:
        state = SequenceState(request, 20, accepted_ns=1, arrival=1)
        state.output_ids += range(100, 100 + outputs)
        return state

    grown = sequence(2)
    names = grown.block_hashes(4, 1)
    assert grown.block_hashes(4, 3)[:1] == names
    grown.output_ids += range(102, 110)
    names = grown.block_hashes(4, 5)
    assert names == sequence(10).block_hashes(4, 5)
    parent = root_hash(0)
    for start in range(0, 20, 4):
        ids = [*range(10), *range(100, 110)][start : start + 4]
        parent = chain_hash(parent, np.array(ids, np.int32).tobytes())
        assert names[start // 4] == parent


def test_the_oldest_waiting_sequence_is_never_overtaken() -> None:
    rig = Rig(ArithmeticRunner(num_slots=8, num_blocks=12))
    rig.add(make_request(0, list(range(24)), 2), make_request(1, list(range(24)), 2), make_request(2, [1], 2))
    rig.step()
    assert [sequence.seq_id for sequence in rig.core.running] == [0]
    assert rig.run([])[2].tokens == expected_output([1], 2)
