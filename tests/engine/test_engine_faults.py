"""A step that breaks costs those whose pass it was, and leaves nothing behind that others could read."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode
from tritandem.engine.runners.cpu import CpuRunner
from tritandem.engine.step import Runner, StepFailed, StepPlan

from tests.engine.engine_rig import Rig, make_runner, prompts, request, tokens_of
from tests.fakes.arithmetic_runner import VOCAB, expected_output
from tests.fakes.delayed_runner import DelayedRunner
from tests.fakes.faulty_runner import FaultyRunner

FAULTS = {
    "passes that are not finite": {"not finite": 0.05},
    "launches that fail": {"refused": 0.03, "half": 0.05},
    "steps that are lost": {"lost": 0.03},
    "everything": {"refused": 0.01, "half": 0.02, "not finite": 0.03, "lost": 0.01},
}


@pytest.mark.parametrize("ahead", [0, 3])
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS.keys())
def test_whose_own_passes_are_sound_gets_the_right_answer_whatever_breaks_for_others(
    faults: dict[str, float], ahead: int
) -> None:
    rng = random.Random(ahead)
    runner = FaultyRunner(rng, faults, num_slots=5, num_blocks=40, launch_ahead_steps=ahead)
    rig = Rig(runner)
    requests: dict[int, EngineRequest] = {}
    cancelled: set[int] = set()
    common = [rng.randrange(VOCAB) for _ in range(30)]
    while len(requests) < 300 or not rig.core.idle():
        if len(requests) < 300 and rng.random() < 0.4 and len(rig.core.waiting) < 20:
            head = common[: rng.randrange(31)] if rng.random() < 0.8 else []
            ids = [*head, len(requests), *(rng.randrange(VOCAB) for _ in range(rng.randrange(12)))]
            sampling = SamplingParams(max_tokens=rng.randint(1, 20))
            stop_ids = tuple({rng.randrange(VOCAB) for _ in range(16)})
            new = EngineRequest(len(requests), np.array(ids, np.int32), sampling, stop_ids)
            requests[new.seq_id] = new
            rig.add(new)
        if rng.random() < 0.05 and rig.core.live_ids():
            victim = rng.choice(rig.core.live_ids())
            cancelled.add(victim)
            rig.core.cancel([victim])
        rig.step()
    rig.read()
    load = rig.core.load()
    assert load.free_blocks == load.total_blocks
    assert sorted(rig.answers) == sorted(requests)
    failed = 0
    for seq_id, one in requests.items():
        answer = rig.answers[seq_id]
        right = expected_output(one.prompt_ids.tolist(), one.sampling.max_tokens, one.stop_ids)
        if answer.finish == FinishCode.CANCELLED:
            assert seq_id in cancelled
        elif answer.finish == FinishCode.ERROR:
            failed += 1
            launch_failed = "refused" in answer.error or "half-way" in answer.error
            assert launch_failed or one.prompt_ids.tobytes() in runner.hurt, f"{seq_id}: {answer.error}"
        else:
            assert answer.tokens == right
        assert answer.tokens == right[: len(answer.tokens)], "a token that nobody chose"
    assert all(runner.happened.values())
    assert 0 < failed < 150
    assert load.prefix_hit_tokens > 500, "prefixes are shared all the same"


class OneBrokenPass:
    """A real runner: what the `number`-th launch stores is not finite."""

    def __init__(self, inner: CpuRunner, number: int = 1) -> None:
        self._inner, self._left = inner, number
        self.spec, self.masks = inner.spec, inner.masks
        self.collect, self.pending, self.busy, self.close = inner.collect, inner.pending, inner.busy, inner.close

    def launch(self, plan: StepPlan) -> None:
        self._left -= 1
        weight = self._inner._forward.model.get_input_embeddings().weight.data
        kept = weight.clone()
        if self._left == 0:
            weight.fill_(float("nan"))
        try:
            self._inner.launch(plan)
        finally:
            weight.copy_(kept)


@pytest.mark.parametrize("attention", ["auto", "dense"])
def test_a_prefix_whose_prefill_broke_once_is_computed_anew(attention: str) -> None:
    prompt = prompts(1, seed=2, low=50, high=51)[0]
    right = Rig(make_runner()).run([request(0, prompt)])[0].tokens
    rig = Rig(OneBrokenPass(make_runner(attention=attention)))
    answers = rig.run([request(0, prompt)])
    assert answers[0].finish == FinishCode.ERROR
    assert answers[0].tokens == [], "a token of logits that are not finite"
    for seq_id in (1, 2):
        answer = rig.run([request(seq_id, prompt)])[seq_id]
        assert (answer.finish, answer.tokens) == (FinishCode.LENGTH, right)
    assert answer.cached_tokens == 48, "a sound prefix is found again"


def test_who_hits_a_broken_prefix_before_it_is_known_to_be_is_computed_anew() -> None:
    prompt = prompts(1, seed=2, low=50, high=51)[0]
    right = Rig(make_runner()).run([request(0, prompt)])[0].tokens
    rig = Rig(DelayedRunner(OneBrokenPass(make_runner(prefill_tokens_per_step=64)), 2))
    rig.add(request(0, prompt))
    rig.core.step()
    rig.add(request(1, prompt), request(2, [*prompt[:32], 5]))
    answers = rig.run([])
    assert answers[0].finish == FinishCode.ERROR
    assert answers[1].cached_tokens == 48, "it did hit"
    assert (answers[1].finish, answers[1].tokens) == (FinishCode.LENGTH, right)
    assert answers[2].finish == FinishCode.LENGTH
    assert rig.run([request(3, prompt)])[3].tokens == right


def test_a_sequence_that_breaks_by_itself_fails_although_it_hit_the_cache() -> None:
    prompt = prompts(1, seed=2, low=50, high=51)[0]
    runner = make_runner()
    rig = Rig(runner)
    rig.run([request(0, prompt)])
    head = runner._forward.model.lm_head.weight
    head.data, sound = torch.full_like(head.data, float("nan")), head.data
    try:
        answer = rig.run([request(1, prompt)])[1]
    finally:
        head.data = sound
    assert answer.finish == FinishCode.ERROR
    assert "not finite" in answer.error
    assert rig.core.load().preemptions == 1, "it was tried once more, not for ever"


class HalfRunner:
    """A real runner whose `number`-th launch carries its prompts out and then fails."""

    def __init__(self, inner: Runner, number: int) -> None:
        self._inner, self._left = inner, number
        self.spec = inner.spec
        self.collect, self.pending, self.busy, self.close = inner.collect, inner.pending, inner.busy, inner.close

    def launch(self, plan: StepPlan) -> None:
        self._left -= 1
        if self._left:
            self._inner.launch(plan)
            return
        assert any(chunk.last for chunk in plan.prefill)
        self._inner.launch(dataclasses.replace(plan, decode_slots=()))
        assert self._inner.collect(wait=True) is not None
        raise StepFailed("broke half-way", [*(chunk.slot for chunk in plan.prefill), *plan.decode_slots])


@pytest.mark.parametrize("number", [1, 2])
def test_a_step_that_breaks_after_its_tokens_were_chosen_counts_them_once(number: int) -> None:
    """A token counted twice would shift the random numbers, the penalties, min_tokens and the budget of its row."""
    ways = [{"temperature": 1.0, "seed": 3}, {"frequency_penalty": 1.5}, {"min_tokens": 3}, {"presence_penalty": 1.0}]
    batch = [request(i, ids, max_tokens=6, **ways[i]) for i, ids in enumerate(prompts(4, seed=6, low=24))]
    right = Rig(make_runner()).run(batch)
    answers = Rig(HalfRunner(make_runner(prefill_tokens_per_step=64), number)).run(batch)
    assert tokens_of(answers) == tokens_of(right)
    assert all(answer.finish == FinishCode.LENGTH for answer in answers.values())
