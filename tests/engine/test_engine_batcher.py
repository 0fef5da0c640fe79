"""What the batcher decides, given a state: no model, no pool, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest
from tritandem.engine.host.batcher import BatchState, Budget, Candidate, Decision, plan, prefill_budget
from tritandem.engine.host.sequence import SequenceState

BUDGET = Budget(
    prefill_tokens=10,
    interleaved_tokens=8,
    stretched_tokens=9,
    efficient_tokens=((16, 2), (32, 4)),
    block_tokens=4,
    reserve_blocks=2,
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


def chunk(decoding: int, budget: Budget = BUDGET, **state: Any) -> int:
    """The prompt tokens of a step beside so many sequences that decode."""
    return prefill_budget(budget, decoding, BatchState((), (), 100, 8, False, **state))


def test_beside_many_sequences_a_step_takes_the_chunk_that_is_cheapest_beside_so_many() -> None:
    assert chunk(0) == 10
    assert chunk(8) == 8, "few wait a little longer for a first token to come soon"
    assert [chunk(9), chunk(16), chunk(17), chunk(32)] == [2, 2, 4, 4]
    assert chunk(99) == 4, "as beside the most that was measured"


def test_chunks_follow_the_pace_at_which_sequences_come_and_go_and_not_what_waits() -> None:
    assert [chunk(20, prompt_share=share) for share in (0.1, 0.25, 5.0)] == [4, 6, 8]
    assert chunk(10, waiting_tokens=10_000) == chunk(10, waiting_tokens=1) == 2
    running_many = [running(arrival, prompt=3, stored=3, blocks=2, outputs=1) for arrival in range(20)]
    line = [candidate(20, 4), candidate(21, 4)]
    assert [a.chunk_tokens for a in decide(running=running_many, waiting=line, prompt_share=0.25).admit] == [4, 2]


def test_chunks_grow_while_prompts_wait_for_them() -> None:
    assert [chunk(10, behind_s=seconds) for seconds in (0, 0.25, 0.5, 1)] == [2, 3, 4, 6]
    assert chunk(32, behind_s=2) == 8


def test_a_step_is_behind_when_its_chunk_has_no_room_for_what_waits() -> None:
    many = [running(arrival, prompt=3, stored=3, blocks=2, outputs=1) for arrival in range(9)]
    assert decide(running=many, waiting=[candidate(9, 3)], waiting_tokens=3).behind
    assert not decide(running=many, waiting=[candidate(9, 2)], waiting_tokens=2).behind
    assert decide(running=many, waiting=[candidate(9, 2), candidate(10, 1)], waiting_tokens=3).behind
    assert not decide(running=many, waiting=[candidate(9, 6, cached_blocks=1)], waiting_tokens=6).behind
    assert decide(running=[*many, running(9, prompt=5, stored=2, blocks=2)]).behind
    assert not decide(running=[*many, running(9, prompt=5, stored=3, blocks=2)]).behind
    assert not decide(running=many, waiting=[candidate(9, 3)], waiting_tokens=3, free_slots=0).behind, (
        "no place is free"
    )


def test_a_chunk_fills_what_its_step_is_padded_to() -> None:
    padded = replace(BUDGET, pass_tokens=(2, 5, 7))
    assert [chunk(20, padded, prompt_share=share) for share in (0, 0.21, 0.26, 5.0)] == [5, 5, 7, 8]


def test_no_stream_pauses_for_a_chunk_longer_than_it_may() -> None:
    assert [chunk(8, pause_tokens=tokens) for tokens in (0, 1, 6, 9)] == [8, 2, 6, 8]
    assert chunk(20, prompt_share=5.0, pause_tokens=6) == 6
    assert chunk(20, prompt_share=5.0, pause_tokens=1) == 4, "less than the cheapest chunk would be no use"
    assert chunk(0, pause_tokens=1) == 10, "nobody waits for it"


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
