"""Answers with a structure: valid whatever else the request asks for, and nobody else's answer changes."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import torch
from tritandem.contracts.stream import FinishCode
from tritandem.engine.host import masks
from tritandem.engine.rows.state import SlotState
from tritandem.engine.sampling.sampler import sample
from tritandem.engine.step import MASKED, STRUCTURED, SamplingFeatures, SlotInit
from tritandem.grammar import Grammar, Kind, compile_grammar

from tests.engine.engine_rig import VOCAB, Rig, make_runner, prompts, request, tokens_of
from tests.engine.spelled import END, SPELLING, allowed, text_of, vocabulary
from tests.engine.structured_rig import (
    DRAWN,
    REGEXES,
    check,
    come_and_go,
    mixture,
    regex,
    run,
    structure_of,
    structured,
)
from tests.fakes.delayed_runner import DelayedRunner

SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["yes", "no"]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_every_answer_matches_its_expression_and_others_are_as_ever() -> None:
    requests = mixture()
    answers = run(make_runner(), requests)
    check(requests, answers)
    assert {answers[i].finish for i in range(15) if i % 3} >= {FinishCode.STOP, FinishCode.COMPLETE}
    alone = run(make_runner(), requests[::3])
    assert tokens_of(alone) == {i: answers[i].tokens for i in range(0, 15, 3)}


@pytest.mark.parametrize("ahead", [1, 3])
def test_steps_launched_ahead_of_their_masks_choose_the_same_tokens(ahead: int) -> None:
    requests = mixture()
    runner = DelayedRunner(make_runner(), ahead)
    assert tokens_of(run(runner, requests)) == tokens_of(run(make_runner(), requests))
    assert runner.waited > 10


def test_a_preempted_answer_goes_on_where_its_structure_stood() -> None:
    requests = mixture()
    plenty = run(make_runner(), requests)
    rig_runner = DelayedRunner(make_runner(num_blocks=26), 2)
    rig = Rig(rig_runner)
    for one in requests:
        rig.core.add(one, 1, structure_of(one))
    assert tokens_of(rig.run(())) == tokens_of(plenty)
    assert rig.core.load().preemptions > 0


def test_a_cached_prompt_changes_no_structured_answer() -> None:
    ids = prompts(1, seed=6, low=30, high=31)[0]
    requests = [structured(i, ids, regex(REGEXES[i]), **DRAWN) for i in range(4)]
    rig = Rig(make_runner())
    for one in requests:
        rig.core.add(one, 1, structure_of(one))
        rig.run(())
    assert [rig.answers[i].cached_tokens for i in range(4)] == [0, 28, 28, 28]
    check(requests, rig.answers)
    assert tokens_of(rig.answers) == tokens_of(run(make_runner(), requests))


@pytest.mark.parametrize("seed", range(3))
def test_whoever_comes_goes_or_gives_way_changes_nobody_else_s_answer(seed: int) -> None:
    """Masks, tables and free rows; sequences arrive, are cancelled and preempted while steps are in flight."""
    rng, requests = random.Random(seed), mixture(24)
    alone = run(make_runner(), requests)
    runner = DelayedRunner(make_runner(num_blocks=40, max_sequences=5), 2)
    rig = Rig(runner)
    cancelled = come_and_go(rig, requests, rng)
    check([one for one in requests if one.seq_id not in cancelled], rig.answers)
    for seq_id, answer in rig.answers.items():
        whole = alone[seq_id].tokens
        assert answer.tokens == (whole[: len(answer.tokens)] if seq_id in cancelled else whole)
    assert cancelled
    assert runner.waited > 0


def test_a_schema_gives_valid_json_and_ends_by_itself() -> None:
    grammar = Grammar(Kind.JSON_SCHEMA, json.dumps(SCHEMA))
    requests = [
        structured(i, ids, grammar, **{**DRAWN, "seed": i, "max_tokens": 120}) for i, ids in enumerate(prompts(6))
    ]
    answers = run(make_runner(), requests)
    finished = [answer for answer in answers.values() if answer.finish != FinishCode.LENGTH]
    assert len(finished) > 2
    for answer in finished:
        found = json.loads(text_of(answer.tokens))
        assert found["a"] in ("yes", "no")
        assert isinstance(found["b"], bool)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"min_tokens": 20},
        {"repetition_penalty": 1.4, "frequency_penalty": 1.0},
        {"bad_words": ((SPELLING.index("b"),), (SPELLING.index("a"), SPELLING.index("c")))},
        {"logit_bias": ((SPELLING.index("c"), 50.0), (SPELLING.index("z"), 100.0))},
        {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.05, "seed": 9},
        {"stop_ids": ()},
    ],
    ids=str,
)
def test_what_else_is_asked_for_applies_within_the_structure(options: dict[str, Any]) -> None:
    """`min_tokens` does not outlive a structure that is complete; without end tokens an answer ends all the same."""
    requests = [structured(i, ids, regex(r"[abc]{4,12}"), max_tokens=60, **options) for i, ids in enumerate(prompts(5))]
    answers = run(make_runner(), requests)
    check(requests, answers)
    for answer in answers.values():
        text = text_of(answer.tokens)
        assert SPELLING.index("b") not in answer.tokens or "bad_words" not in options
        if "min_tokens" in options:
            assert answer.finish == FinishCode.COMPLETE
            assert len(text) == 12


def test_an_answer_cut_short_says_length_and_one_that_just_fits_does_not() -> None:
    cut, fits = (
        run(make_runner(), [structured(1, [5, 6], regex("xxxxxx"), max_tokens=budget)])[1] for budget in (5, 6)
    )
    assert (text_of(cut.tokens), cut.finish) == ("xxxxx", FinishCode.LENGTH)
    assert (text_of(fits.tokens), fits.finish) == ("xxxxxx", FinishCode.COMPLETE)


def test_logprobs_are_of_what_the_structure_allows() -> None:
    """As vLLM reports them; alternatives that are not allowed are none."""
    answer = run(make_runner(), [structured(1, [5, 6], regex("(yes|no)x"), logprobs=5)])[1]
    starts = {SPELLING.index(piece) for piece in ("yes", "y", "no", "n")}
    assert set(answer.top_ids[0][:4]) == starts
    assert answer.top_ids[0][4] == -1
    assert answer.logprobs[-1] == pytest.approx(0.0, abs=1e-5)  # only one token could follow


def test_a_structure_that_other_fields_leave_no_token_ends_that_answer_alone() -> None:
    options = {"bad_words": tuple((SPELLING.index(char),) for char in "abc"), "min_tokens": 3}
    other = request(2, [7, 8, 9], max_tokens=8)
    answers = run(make_runner(), [structured(1, [5, 6], regex("[a-c]"), **options), other])
    assert answers[1].finish == FinishCode.ERROR
    assert "structure of the answer allows next, bad_words, min_tokens forbid" in answers[1].error
    assert answers[2].tokens == run(make_runner(), [other])[2].tokens


def test_a_structure_that_is_slow_to_follow_ends_for_the_others_sake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "SLOW_STEP_NS", 0)
    monkeypatch.setattr(masks, "SLOW_MASK_NS", 0)  # every mask takes longer
    other = request(2, [7, 8, 9], max_tokens=30)
    answers = run(make_runner(), [structured(1, [5, 6], regex("[a-f]{30}"), max_tokens=40), other])
    assert answers[1].finish == FinishCode.ERROR
    assert len(answers[1].tokens) == masks.MANY_SLOW_MASKS
    assert "structure" in answers[1].error
    assert answers[2].tokens == run(make_runner(), [other])[2].tokens


def test_masks_come_before_everything_and_leave_free_rows_alone() -> None:
    state, nothing = SlotState.empty(3, 4, VOCAB, "cpu"), np.zeros(0, np.int32)
    ordinary = request(0, [1]).sampling
    for slot, kind in enumerate((MASKED, 0, MASKED)):
        state.init_row(SlotInit(slot, np.array([1], np.int32), ordinary, (), (), nothing, structure=kind), 64)
    state.masks.fill_(-1)
    state.masks[0] = 0
    state.masks[0, 2] = 0b1010  # ids 65 and 67
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([2, 1, 0, 3])
    sampled = sample(logits, rows, state, SamplingFeatures(frozenset({STRUCTURED}), top_logprobs=2))
    assert sampled.tokens[[0, 1, 3]].tolist() == logits.argmax(dim=1)[[0, 1, 3]].tolist()
    assert sampled.tokens[2] == (65 if logits[2, 65] > logits[2, 67] else 67)
    assert sampled.top_ids is not None
    assert set(sampled.top_ids[2].tolist()) == {65, 67}


def test_the_vocabulary_s_padding_is_never_allowed() -> None:
    matcher = compile_grammar(vocabulary(), regex(r"(.|\n)*"))
    mask = np.full(vocabulary().words, -1, np.int32)
    matcher.mask_into(mask)
    assert max(allowed(mask)) == END
