"""What the batcher decides, given a state: no model, no pool, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest
from tritandem.engine.host.batcher import BatchState, Budget, Candidate, Decision, plan, prefill_budget
from tritandem.engine.host.sequence import SequenceState

BUDGET = Budget(
    prefill_tokens=10, interleaved_tokens=8, stretched_tokens=9, efficient_tokens=2, block_tokens=4, reserve_blocks=2
)


def sequence(arrival: int, prompt: int, max_tokens: int = 50) -> SequenceState:
    request = EngineRequest(arrival, np.zeros(prompt, np.int32), SamplingParams(max_tokens=max_tokens))
    return SequenceState(request, max_tokens, accepted_ns=1, arrival=arrival)


def running(
    arrival: int, prompt: int, stored: int, blocks: int, outputs: int = 0, max_tokens: int = 50
) -> SequenceState:
    state = sequence(arrival, prompt, max_tokens)
    state.begin(arrival, list(range(1, blocks + 1)), 0)
    state.stored, state.promised = stored, outputs
    return state


def candidate(arrival: int, prompt: int, cached_blocks: int = 0) -> Candidate:
    return Candidate(sequence(arrival, prompt), prompt, range(1, cached_blocks + 1), -(-prompt // 4) - cached_blocks)


def decide(**given: Any) -> Decision:
    state = {"running": (), "waiting": (), "free_blocks": 100, "free_slots": 8, "in_flight": False, **given}
    return plan(BatchState(**state), BUDGET)


def test_everything_that_can_decode_does_and_the_rest_of_the_budget_prefills_oldest_first() -> None:
    decoding = running(0, prompt=3, stored=3, blocks=2, outputs=1)
    first, second = running(1, prompt=30, stored=23, blocks=8), running(2, prompt=30, stored=0, blocks=8)
    decision = decide(running=[decoding, first, second], waiting=[candidate(3, 4)])
    assert list(decision.decode) == [decoding]
    assert list(decision.prefill) == [(first, 7), (second, 1)]
    assert list(decision.admit) == []


def test_prefill_beside_running_sequences_has_a_budget_of_its_own() -> None:
    decoding, prompt = running(0, prompt=3, stored=3, blocks=2, outputs=1), running(1, prompt=30, stored=0, blocks=8)
    assert list(decide(running=[decoding, prompt]).prefill) == [(prompt, 8)]
    assert list(decide(running=[prompt]).prefill) == [(prompt, 10)]


def test_beside_few_sequences_a_chunk_stretches_when_that_ends_the_prompt() -> None:
    few = [running(0, prompt=3, stored=3, blocks=2, outputs=1)]
    many = [running(arrival, prompt=3, stored=3, blocks=2, outputs=1) for arrival in range(9)]
    line = [candidate(9, 9), candidate(10, 4)]
    assert [a.chunk_tokens for a in decide(running=few, waiting=line).admit] == [9]
    assert [a.chunk_tokens for a in decide(running=few, waiting=[candidate(9, 10)]).admit] == [8]
    assert [a.chunk_tokens for a in decide(running=few, waiting=[candidate(9, 5), candidate(10, 4)]).admit] == [5, 4]
    tail = running(10, prompt=30, stored=21, blocks=8)
    assert list(decide(running=[*few, tail]).prefill) == [(tail, 9)]
    assert [a.chunk_tokens for a in decide(running=many, waiting=[candidate(9, 3)]).admit] == [2]


def test_beside_many_sequences_chunks_are_small_unless_the_backlog_is_long() -> None:
    assert prefill_budget(BUDGET, decoding=0, backlog=100, prompt_share=0.1) == 10
    assert prefill_budget(BUDGET, decoding=8, backlog=100, prompt_share=0.1) == 8
    assert prefill_budget(BUDGET, decoding=9, backlog=64, prompt_share=0) == 2
    assert prefill_budget(BUDGET, decoding=9, backlog=160, prompt_share=0) == 5
    assert prefill_budget(BUDGET, decoding=9, backlog=400, prompt_share=0) == 8


def test_chunks_grow_with_the_pace_at_which_sequences_come_and_go() -> None:
    assert prefill_budget(BUDGET, decoding=10, backlog=0, prompt_share=0.1) == 2
    assert prefill_budget(BUDGET, decoding=20, backlog=0, prompt_share=0.1) == 4
    assert prefill_budget(BUDGET, decoding=20, backlog=64, prompt_share=0.1) == 6
    assert prefill_budget(BUDGET, decoding=20, backlog=0, prompt_share=5.0) == 8
    running_many = [running(arrival, prompt=3, stored=3, blocks=2, outputs=1) for arrival in range(20)]
    line = [candidate(20, 4), candidate(21, 4)]
    assert [a.chunk_tokens for a in decide(running=running_many, waiting=line, prompt_share=0.15).admit] == [4, 2]


def test_a_sequence_whose_last_token_is_launched_is_left_alone() -> None:
    done = running(0, prompt=3, stored=7, blocks=2, outputs=5, max_tokens=5)
    assert decide(running=[done]) == Decision([], [], [], [])


def test_a_block_is_added_before_it_is_needed_with_a_reserve_where_there_is_room() -> None:
    full = running(0, prompt=4, stored=4, blocks=1, outputs=1)
    assert list(decide(running=[full]).grow) == [(full, 3)]
    assert list(decide(running=[full], free_blocks=1).grow) == [(full, 1)]
    near_its_end = running(0, prompt=4, stored=4, blocks=1, outputs=1, max_tokens=3)
    assert list(decide(running=[near_its_end]).grow) == [(near_its_end, 1)]


def test_without_blocks_results_are_read_first_and_then_the_newest_gives_way() -> None:
    old = running(0, prompt=4, stored=4, blocks=1, outputs=1)
    new = running(1, prompt=8, stored=0, blocks=2)
    assert decide(running=[new, old], free_blocks=0, in_flight=True).drain
    assert decide(running=[new, old], free_blocks=0).preempt is new


def test_newcomers_are_admitted_in_order_within_slots_tokens_and_blocks() -> None:
    line = [candidate(0, 4), candidate(1, 4), candidate(2, 4), candidate(3, 4)]
    admitted = decide(waiting=line).admit
    assert [(a.candidate.sequence.arrival, a.chunk_tokens) for a in admitted] == [(0, 4), (1, 4), (2, 2)]
    assert [a.reserve_blocks for a in admitted] == [2, 2, 2]
    assert len(decide(waiting=line, free_slots=1).admit) == 1
    assert len(decide(waiting=line, free_blocks=3).admit) == 2


def test_a_newcomer_leaves_a_block_for_each_that_runs() -> None:
    decoding = running(0, prompt=3, stored=3, blocks=2, outputs=1)
    assert not decide(running=[decoding], waiting=[candidate(1, 8)], free_blocks=2).admit
    assert decide(running=[decoding], waiting=[candidate(1, 8)], free_blocks=3).admit


def test_cached_tokens_cost_no_budget() -> None:
    admitted = decide(waiting=[candidate(0, 13, cached_blocks=3)]).admit
    assert [a.chunk_tokens for a in admitted] == [1]


def test_the_waiting_line_is_looked_at_no_further_than_needed() -> None:
    def line() -> Iterator[Candidate]:
        yield candidate(0, 30)
        raise AssertionError("looked past a candidate that took the whole budget")

    assert len(decide(waiting=line()).admit) == 1
