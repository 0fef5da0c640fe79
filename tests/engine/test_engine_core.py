"""The core: preemption, launch-ahead, cancellation and failures change nobody else's tokens and lose nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tritandem.contracts.errors import InvalidRequest
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode
from tritandem.engine.host.validation import validate
from tritandem.engine.step import StepFailed, StepPlan

from tests.engine.engine_rig import VOCAB, Rig, make_runner, prompts, request, tokens_of
from tests.fakes.delayed_runner import DelayedRunner
from tests.fakes.poisoned_runner import PoisonedRunner

MIXED = [
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.2, "seed": 6, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "seed": 7, "min_p": 0.05, "repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.0, "seed": 9, "logprobs": 3},
]


def mixed_requests(count: int, seed: int = 0, max_tokens: int = 24) -> list[EngineRequest]:
    batch = prompts(count, seed, low=3, high=30)
    return [request(i, ids, max_tokens=max_tokens, **MIXED[i % len(MIXED)]) for i, ids in enumerate(batch)]


def test_a_preempted_sequence_resumes_with_identical_output() -> None:
    batch = mixed_requests(6)
    roomy = Rig(make_runner()).run(batch)
    rig = Rig(make_runner(num_blocks=28, prefill_tokens_per_step=16))
    cramped = rig.run(batch)
    assert rig.core.load().preemptions > 0
    assert tokens_of(cramped) == tokens_of(roomy)
    assert cramped[5].top_ids == roomy[5].top_ids
    assert cramped[5].logprobs == pytest.approx(roomy[5].logprobs, abs=1e-4)


@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("num_blocks", [128, 28])
def test_launching_ahead_gives_the_tokens_of_launching_in_step(ahead: int, num_blocks: int) -> None:
    free = Rig(make_runner()).run(mixed_requests(8, seed=2))
    stop = free[0].tokens[6]
    batch = [dataclasses.replace(r, stop_ids=(stop,)) for r in mixed_requests(8, seed=2)]
    in_step = Rig(make_runner()).run(batch)
    runner = DelayedRunner(make_runner(num_blocks=num_blocks, max_sequences=5, prefill_tokens_per_step=16), ahead)
    assert tokens_of(Rig(runner).run(batch)) == tokens_of(in_step)
    assert runner.deepest == ahead + 1
    assert in_step[0].finish == FinishCode.STOP


def test_seeded_sampling_does_not_depend_on_the_batch() -> None:
    batch = mixed_requests(6, seed=4)
    together = Rig(make_runner()).run(batch)
    for one in batch:
        alone = Rig(make_runner(max_sequences=1)).run([one])
        assert alone[one.seq_id].tokens == together[one.seq_id].tokens


def test_a_cancelled_sequence_ends_once_and_others_do_not_notice() -> None:
    batch = mixed_requests(4, seed=8)
    undisturbed = Rig(make_runner()).run(batch)
    rig = Rig(DelayedRunner(make_runner(), 2))
    rig.add(*batch)
    for _ in range(6):
        rig.step()
    rig.core.cancel([1, 99, 1])
    rig.core.cancel([1])
    answers = rig.run([])
    assert answers[1].finish == FinishCode.CANCELLED
    assert answers[1].tokens == undisturbed[1].tokens[: len(answers[1].tokens)]
    for i in (0, 2, 3):
        assert answers[i].tokens == undisturbed[i].tokens


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("ahead", [0, 2])
def test_sequences_of_one_prompt_answer_as_each_would_alone(prefix_cache: bool, ahead: int) -> None:
    families = [
        dataclasses.replace(request(10 * number + i, ids, max_tokens=20, **MIXED[i]), family=number)
        for number, ids in enumerate(prompts(3, seed=12, low=3, high=40), start=1)
        for i in range(len(MIXED))
    ]
    runner = make_runner(prefill_tokens_per_step=16)
    together = Rig(DelayedRunner(runner, ahead) if ahead else runner, prefix_cache).run(families)
    alone = Rig(make_runner(), prefix_cache=False).run([dataclasses.replace(one, family=0) for one in families])
    assert tokens_of(together) == tokens_of(alone)
    assert sum(answer.cached_tokens > 0 for answer in together.values()) >= 3 * (len(MIXED) - 1)


def test_a_step_that_failed_copies_a_familys_block_again() -> None:
    class Flaky(PoisonedRunner):
        """Breaks where blocks are to be copied, once."""

        def launch(self, plan: StepPlan) -> None:
            if plan.copies and not self.failures:
                self.failures = 1
                raise RuntimeError("a kernel broke")
            super().launch(plan)

    ids = prompts(1, seed=13, low=30)[0]
    family = [dataclasses.replace(request(i, ids, **MIXED[i]), family=7) for i in range(4)]
    runner = Flaky(make_runner(), -1, step_failed)
    answers = Rig(runner).run(family)
    assert runner.failures == 1
    assert tokens_of(answers) == tokens_of(Rig(make_runner()).run([dataclasses.replace(f, family=0) for f in family]))


def step_failed(slots: list[int]) -> Exception:
    return StepFailed("a kernel broke", slots)


def out_of_memory(slots: list[int]) -> Exception:
    return torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("error", [step_failed, out_of_memory])
def test_a_poisoned_sequence_fails_alone(error: object) -> None:
    batch = [request(i, [i + 1, *ids]) for i, ids in enumerate(prompts(5, seed=9))]
    healthy = Rig(make_runner()).run(batch)
    runner = PoisonedRunner(make_runner(), poison_id=3, error=error)  # type: ignore[arg-type]
    answers = Rig(runner).run(batch)
    assert runner.failures > 0
    assert answers[2].finish == FinishCode.ERROR
    assert "memory" in answers[2].error or "kernel" in answers[2].error
    for i in (0, 1, 3, 4):
        assert answers[i].tokens == healthy[i].tokens
        assert answers[i].finish == FinishCode.LENGTH


def test_logits_that_are_not_finite_fail_their_sequence_alone() -> None:
    runner = make_runner()
    cache = runner._forward.cache
    rig = Rig(runner, prefix_cache=False)
    rig.add(request(0, range(9)), request(1, range(20, 30)))
    rig.step()
    cache.values[0][rig.core.running[1].blocks[0]] = float("nan")
    answers = rig.run([])
    assert answers[1].finish == FinishCode.ERROR
    assert "finite" in answers[1].error
    assert answers[0].tokens == Rig(make_runner()).run([request(0, range(9))])[0].tokens


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (EngineRequest(1, np.array([], np.int32), SamplingParams()), "input_ids"),
        (EngineRequest(1, np.array([VOCAB], np.int32), SamplingParams()), "input_ids"),
        (EngineRequest(1, np.array([-1], np.int32), SamplingParams()), "input_ids"),
        (EngineRequest(1, np.zeros(256, np.int32), SamplingParams()), "input_ids"),
        (EngineRequest(1, np.array([1], np.int32), SamplingParams(), stop_ids=(VOCAB,)), "stop_ids"),
        (EngineRequest(1, np.array([1], np.int32), SamplingParams(), stop_ids=tuple(range(17))), "stop_ids"),
        (EngineRequest(1, np.array([1], np.int32), SamplingParams(), bad_words=((),)), "bad_words"),
        (EngineRequest(1, np.array([1], np.int32), SamplingParams(), bad_words=((1, -4),)), "bad_words"),
    ],
)
def test_a_request_that_cannot_run_is_refused_by_field(bad: EngineRequest, field: str) -> None:
    with pytest.raises(InvalidRequest, match=field):
        validate(bad, make_runner().spec)


def test_a_long_prompt_leaves_the_decoding_of_others_in_every_step() -> None:
    rig = Rig(make_runner(prefill_tokens_per_step=8))
    rig.add(request(0, [1, 2, 3], max_tokens=40))
    rig.step()
    rig.add(request(1, np.arange(100) % VOCAB, max_tokens=2))
    for count in range(2, 14):
        rig.step()
        assert len(rig.answers[0].tokens) == count
    assert 1 in rig.run([])
