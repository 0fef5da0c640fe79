"""Tokens that a structure leaves no choice about cost no steps of their own, and change no answer."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode
from tritandem.engine.host.forcing import Forcing
from tritandem.engine.step import Runner
from tritandem.grammar import Grammar, Kind

from tests.engine.engine_rig import Answer, Rig, make_runner, prompts, request
from tests.engine.spelled import END, SPELLING, text_of
from tests.engine.structured_rig import DRAWN, begun, come_and_go, regex, structure_of, structured, table_walker
from tests.fakes.delayed_runner import DelayedRunner

FIXED = (
    r"it begins with this: [ab]{2}",
    r"(yes|no), and then the rest, (yes|no)\.",
    r"[a-c]{3} of a kind [0-9] and one more",
    r"(the left side|one on the right)(, then (the left side|one on the right)){2}",
)
WITHOUT = Forcing(least_run=0)
EVERYWHERE = Forcing(most_running=1000)
SCHEMA = {
    "type": "object",
    "properties": {"the first of all": {"enum": ["yes", "no"]}, "another property": {"const": "always the same"}},
    "required": ["the first of all", "another property"],
    "additionalProperties": False,
}


def fixed(count: int = 8, **options: Any) -> list[EngineRequest]:
    """Every fourth has no structure."""
    made = []
    for number, ids in enumerate(prompts(count, seed=11, high=30)):
        if number % 4:
            made.append(structured(number, ids, regex(FIXED[number % 3]), **{**DRAWN, "seed": number, **options}))
        else:
            made.append(request(number, ids, **DRAWN))
    return made


def answered(runner: Runner, requests: list[EngineRequest], forcing: Forcing, structure: Any = structure_of) -> Rig:
    rig = begun(Rig(runner, forcing=forcing), requests, structure)
    rig.run(())
    return rig


def ends(answers: dict[int, Answer]) -> dict[int, tuple[list[int], FinishCode]]:
    return {seq_id: (answer.tokens, answer.finish) for seq_id, answer in answers.items()}


@pytest.mark.parametrize("ahead", [0, 1, 3])
@pytest.mark.parametrize("structure", [structure_of, table_walker])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_are_the_same_in_fewer_steps(ahead: int, structure: Any, temperature: float) -> None:
    requests = fixed(temperature=temperature)
    few, many = (
        answered(DelayedRunner(make_runner(), ahead) if ahead else make_runner(), requests, forcing, structure)
        for forcing in (EVERYWHERE, WITHOUT)
    )
    assert ends(few.answers) == ends(many.answers)
    assert {answer.finish for answer in few.answers.values()} >= {FinishCode.COMPLETE}
    assert few.core.load().output_tokens == many.core.load().output_tokens


def test_what_an_answer_must_begin_with_is_prefilled_with_its_prompt() -> None:
    one = structured(1, [5, 6], regex("abcdefghijk[xyz]"), max_tokens=20)
    rig = answered(make_runner(), [one], Forcing(most_running=0))
    assert text_of(rig.answers[1].tokens)[:-1] == "abcdefghijk"
    assert rig.core.load().steps == 1
    assert rig.answers[1].finish == FinishCode.COMPLETE


def test_of_a_prompt_no_more_is_said_to_be_cached_than_it_has() -> None:
    rig = Rig(make_runner())
    for number in range(2):
        begun(rig, [structured(number, [5, 6, 7, 8, 9, 10], regex("abcdefghijklm[xyz]"), max_tokens=20)]).run(())
    assert [rig.answers[number].cached_tokens for number in range(2)] == [0, 6]
    assert rig.core.load().prefix_hit_tokens == 6
    assert rig.answers[0].tokens == rig.answers[1].tokens


def test_an_answer_that_ends_before_its_first_step_has_no_tokens() -> None:
    rig = begun(Rig(make_runner()), [structured(1, [5, 6], regex("abcdefghijklm[xyz]"), max_tokens=20)])
    rig.core.cancel([1])
    rig.read()
    assert (rig.answers[1].tokens, rig.answers[1].finish) == ([], FinishCode.CANCELLED)
    rig.core.check_integrity()


def test_the_middle_of_an_answer_costs_a_step_whatever_its_length() -> None:
    steps = []
    for length in (6, 30):
        one = structured(1, [5, 6], regex(f"[xyz]{'m' * length}[xyz]"), max_tokens=60)
        rig = answered(make_runner(), [one], Forcing())
        assert len(rig.answers[1].tokens) == length + 2
        steps.append(rig.core.load().steps)
    assert steps == [2, 2]


def test_beside_many_sequences_only_beginnings_are_taken() -> None:
    requests = [structured(i, [5, 6 + i], regex("abcdef[xyz]mmmmmm[xyz]"), max_tokens=60) for i in range(3)]
    rig = answered(make_runner(), requests, Forcing(most_running=2))
    assert rig.core.load().steps == 8
    assert ends(rig.answers) == ends(answered(make_runner(), requests, WITHOUT).answers)


def test_short_runs_are_chosen() -> None:
    one = structured(1, [5, 6], regex("[xyz]mmm[xyz]mmm[xyz]"), max_tokens=60)
    assert answered(make_runner(), [one], Forcing()).core.load().steps == 9
    assert answered(make_runner(), [one], Forcing(least_run=3)).core.load().steps == 3


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 9},
        {"max_tokens": 1},
        {"stop_ids": (END, SPELLING.index("h"))},
        {"min_tokens": 12},
        {"logprobs": 2},
        {"repetition_penalty": 1.4, "frequency_penalty": 1.0},
        {"bad_words": ((SPELLING.index("q"),),)},
        {"logit_bias": ((SPELLING.index("a"), 50.0),)},
        {"temperature": 1.5, "top_k": 3, "top_p": 0.9, "min_p": 0.05, "seed": 9},
        {"prompt_logprobs": 1},
    ],
    ids=str,
)
def test_whatever_else_is_asked_for_the_answer_is_the_same(options: dict[str, Any], ahead: int) -> None:
    requests = fixed(**options)
    runs = [
        answered(DelayedRunner(make_runner(), ahead) if ahead else make_runner(), requests, forcing).answers
        for forcing in (EVERYWHERE, WITHOUT)
    ]
    assert ends(runs[0]) == ends(runs[1])
    for seq_id, answer in runs[0].items():
        assert answer.logprobs == pytest.approx(runs[1][seq_id].logprobs, abs=1e-4, nan_ok=True)
        assert answer.top_ids == runs[1][seq_id].top_ids
        assert (answer.scores is None) == (runs[1][seq_id].scores is None)


def test_a_schema_s_fixed_parts_are_taken() -> None:
    grammar = Grammar(Kind.JSON_SCHEMA, json.dumps(SCHEMA))
    requests = [structured(i, ids, grammar, temperature=0.0, max_tokens=200) for i, ids in enumerate(prompts(3))]
    with_runs, without = (answered(make_runner(), requests, forcing) for forcing in (EVERYWHERE, WITHOUT))
    assert ends(with_runs.answers) == ends(without.answers)
    finished = [one for one in with_runs.answers.values() if one.finish != FinishCode.LENGTH]
    assert finished
    assert all(json.loads(text_of(one.tokens))["another property"] == "always the same" for one in finished)
    assert with_runs.core.load().steps < 0.7 * without.core.load().steps


@pytest.mark.parametrize("seed", range(3))
def test_whoever_comes_goes_or_gives_way_changes_nobody_else_s_answer(seed: int) -> None:
    """Masks, tables and free rows, few blocks; sequences arrive, are cancelled and preempted, steps are in flight."""
    rng, requests = random.Random(seed), fixed(20)
    alone = answered(make_runner(), requests, WITHOUT).answers
    runner = DelayedRunner(make_runner(num_blocks=40, max_sequences=5), 1 + seed % 3)
    rig = Rig(runner, forcing=EVERYWHERE)
    cancelled = come_and_go(rig, requests, rng)
    for seq_id, answer in rig.answers.items():
        whole = alone[seq_id].tokens
        assert answer.tokens == (whole[: len(answer.tokens)] if seq_id in cancelled else whole)
    assert cancelled
    load = rig.core.load()
    assert load.free_blocks == load.total_blocks


def test_a_preempted_answer_goes_on_behind_what_was_taken() -> None:
    requests = [structured(i, ids, regex(FIXED[3]), **DRAWN) for i, ids in enumerate(prompts(8, seed=3, low=20))]
    plenty = answered(make_runner(), requests, WITHOUT).answers
    rig = answered(DelayedRunner(make_runner(num_blocks=44), 2), requests, EVERYWHERE)
    assert ends(rig.answers) == ends(plenty)
    assert rig.core.load().preemptions > 0


class FailingSometimes:
    """A real runner that does not launch some steps that end a prefill, or fails half-way, its rows changed."""

    def __init__(self, inner: Runner, rng: random.Random) -> None:
        self._inner, self._rng, self.failed = inner, rng, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, plan: Any) -> None:
        from tritandem.engine.step import StepFailed

        slots = [chunk.slot for chunk in plan.prefill if chunk.last]
        if slots and len(slots) + len(plan.decode_slots) > 1 and self._rng.random() < 0.8:
            self.failed += 1
            if self._rng.random() < 0.5:
                firsts = [dataclasses.replace(chunk, targets=None) for chunk in plan.prefill]
                self._inner.launch(dataclasses.replace(plan, prefill=firsts, decode_slots=()))
                self._inner.collect(wait=True)
            raise StepFailed("half-way", [*slots, *plan.decode_slots])
        self._inner.launch(plan)


@pytest.mark.parametrize("seed", range(3))
def test_a_step_that_fails_is_tried_again_with_the_same_run(seed: int) -> None:
    requests = fixed(16)
    runner = FailingSometimes(make_runner(), random.Random(seed))
    rig = answered(runner, requests, EVERYWHERE)  # type: ignore[arg-type]
    assert ends(rig.answers) == ends(answered(make_runner(), requests, WITHOUT).answers)
    assert runner.failed


def test_the_switch_of_the_configuration_reaches_the_core() -> None:
    spec = make_runner().spec
    assert Forcing.of(4, spec) == Forcing()
    assert Forcing.of(0, spec).least_run == 0
    one_by_one = dataclasses.replace(spec, launch_ahead_steps=3)
    assert Forcing.of(4, one_by_one).most_running == 0
    assert Forcing.of(4, dataclasses.replace(one_by_one, pass_tokens=(32,))) == Forcing()
    assert Forcing.of(4, dataclasses.replace(spec, window_tokens=64)).most_running == 0


def test_texts_are_told_as_soon_as_they_are_known() -> None:
    """Not with the token behind them."""
    rig = begun(Rig(make_runner()), [structured(1, [5, 6], regex("[xyz]mmmmmmmm[xyz]"), max_tokens=60)])
    rig.step()
    assert len(rig.answers[1].tokens) == 9
