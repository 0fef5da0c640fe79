"""What to run follows from the plan alone: words, captured sizes and the records that will be read. No device."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from tritandem.contracts.fields import SamplingParams
from tritandem.engine.rows.layout import FIELDS, INIT_HEAD, INIT_WORDS, OFFSETS, ROW_WORDS
from tritandem.engine.runners.pass_size import DecodeSize, PassSize, rows_of_pass
from tritandem.engine.runners.program import Part, Record, make_program
from tritandem.engine.sampling.prompt_scores import scored_rows
from tritandem.engine.step import GREEDY, PrefillChunk, RunnerSpec, SamplingFeatures, SlotInit, StepPlan

SPEC = RunnerSpec("cpu", 8, 64, 16, 256, 64, 32, ((8, 32),), 97, 2)
SAMPLED = SamplingFeatures(frozenset({"sampled"}))


def chunk(slot: int, start: int, count: int, last: bool) -> PrefillChunk:
    return PrefillChunk(slot, start, np.arange(count, dtype=np.int32), last)


def programmed(plan: StepPlan, told: tuple[int, ...] = (), size: PassSize | None = None):
    return make_program(plan, told, SPEC, lambda rows, chunks: size, lambda rows, features: DecodeSize(8, features))


def test_a_steady_step_has_nothing_to_tell() -> None:
    program = programmed(StepPlan(1, decode_slots=[3, 5]), told=(3, 5))
    assert program.words is None
    assert (program.step, program.size, program.eager) == (DecodeSize(8, GREEDY), None, None)
    assert program.records == (Record(8, (Part((3, 5)),)),)


def test_rows_that_changed_are_told() -> None:
    program = programmed(StepPlan(1, decode_slots=[5, 3]), told=(3, 5))
    assert program.words is not None
    assert program.words.decode_rows == 2
    assert np.concatenate(program.words.arrays).tolist() == [5, 3]


@pytest.mark.parametrize("features", [GREEDY, SAMPLED])
def test_a_pass_carries_the_decode_rows_and_reports_once(features: SamplingFeatures) -> None:
    """First tokens stand behind the pass's rows, but come first in the result."""
    size = PassSize(rows=8, tokens=32)
    plan = StepPlan(1, prefill=[chunk(2, 0, 5, True), chunk(4, 0, 3, False)], decode_slots=[1], features=features)
    program = programmed(plan, size=size)
    assert program.step is None
    assert program.firsts == 1
    [record] = program.records
    assert record.rows == rows_of_pass(size, 1, features)
    assert record.parts == (Part([2], first=8), Part((1,)))
    assert record.rows >= 8 + 1


def test_a_pass_without_room_for_the_rows_leaves_them_a_step_of_their_own() -> None:
    plan = StepPlan(1, prefill=[chunk(2, 0, 5, True)], decode_slots=[1])
    program = programmed(plan, size=PassSize(rows=0, tokens=32))
    assert [record.parts for record in program.records] == [(Part([2], first=0),), (Part((1,)),)]
    assert program.step == DecodeSize(8, GREEDY)


def test_a_chunk_that_is_scored_runs_eagerly_with_whoever_is_beside_it() -> None:
    scored = dataclasses.replace(chunk(2, 0, 5, True), targets=np.arange(4, dtype=np.int32), alternatives=3)
    plan = StepPlan(1, prefill=[chunk(4, 0, 3, False), scored], decode_slots=[1])
    program = programmed(plan, size=PassSize(rows=8, tokens=32))
    assert program.size is None
    assert program.eager is not None
    assert program.eager.scored == plan.prefill
    assert [record.parts for record in program.records] == [(Part([2]),), (Part((1,)),)]
    assert scored_rows(plan.prefill, "cpu").tolist() == [3, 4, 5, 6]


def test_chunks_that_no_graph_holds_run_eagerly() -> None:
    plan = StepPlan(1, prefill=[chunk(2, 7, 5, False), chunk(4, 0, 9, True)])
    program = programmed(plan)
    assert program.eager is not None
    assert (program.eager.longest, program.eager.reach, program.eager.firsts) == (9, 12, 1)
    assert program.records == (Record(1, (Part([4]),)),)


def test_chunks_that_end_no_prompt_report_nothing() -> None:
    assert programmed(StepPlan(1, prefill=[chunk(2, 0, 5, False)])).records == ()


def test_an_init_travels_as_the_row_that_it_becomes() -> None:
    """Every field of the layout stands where its offset says, in its own type."""
    sampling = SamplingParams(
        max_tokens=50, min_tokens=3, temperature=0.5, top_k=2**31 - 1, top_p=0.25, min_p=0.125,
        repetition_penalty=1.5, presence_penalty=-1.0, frequency_penalty=0.75, seed=2**62 + 12345,
    )  # fmt: skip
    prompt, output = np.arange(1, 12, dtype=np.int32), np.array([90, 91], np.int32)
    bias, allowed = ((1, 0.5), (2, -0.5)), (5, 6, 7)
    init = SlotInit(4, prompt, sampling, (7, 8), ((5, 6),), output, bias, allowed)
    updates = np.array([(4, 0, 11), (4, 1, 12), (6, 3, 13)], np.int32)
    program = programmed(StepPlan(1, inits=[init], block_updates=updates))
    assert program.words is not None
    words = program.words.arrays[0]
    assert len(words) == INIT_WORDS == INIT_HEAD + ROW_WORDS
    assert words[:INIT_HEAD].tolist() == [4, 0, 2]  # slot and its block updates
    row = words[INIT_HEAD:]
    types = {"i": np.int32, "f": np.float32, "q": np.int64}
    got = {f.name: row[OFFSETS[f.name] : OFFSETS[f.name] + f.words].view(types[f.code]).tolist() for f in FIELDS}
    assert got == {
        "seed": [2**62 + 12345],
        "last_token": [0],
        "length": [0],
        "remaining": [48],
        "produced": [2],
        "finished": [0],
        "min_tokens": [3],
        "top_k": [2**31 - 1],
        "temperature": [0.5],
        "top_p": [0.25],
        "min_p": [0.125],
        "repetition_penalty": [1.5],
        "presence_penalty": [-1.0],
        "frequency_penalty": [0.75],
        "bad_word_count": [1],
        "bias_count": [2],
        "allowed_count": [3],
        "structure": [0],
        "structure_state": [0],
        "stop_ids": [7, 8, *[-1] * 14],
        "recent": [7, 8, 9, 10, 11, 90, 91],
    }
