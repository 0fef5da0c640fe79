"""Log-probabilities of a prompt's own tokens are the model's, however the prompt is cut and whoever is beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode, TokenScores
from tritandem.engine.host import batcher
from tritandem.engine.sampling.prompt_scores import ROWS_AT_ONCE, score_tokens

from tests.engine.engine_rig import Answer, Rig, make_runner, prompts, reference_model, request, tokens_of
from tests.fakes.delayed_runner import DelayedRunner
from tests.fakes.poisoned_runner import PoisonedRunner

K = 3


def scored_requests(count: int, seed: int = 0, **more: Any) -> list[EngineRequest]:
    """Every second one's prompt is scored."""
    return [
        request(i, ids, **({"prompt_logprobs": K} if i % 2 else {}), **more)
        for i, ids in enumerate(prompts(count, seed, low=20, high=60))
    ]


def assert_models_own(kind: str, asked: EngineRequest, answer: Answer) -> None:
    scores = answer.scores
    if asked.sampling.prompt_logprobs is None:
        assert scores is None
        return
    assert scores is not None
    ids = torch.from_numpy(asked.prompt_ids.astype(np.int64))
    with torch.no_grad():
        logprobs = reference_model(kind)(ids[None]).logits[0, :-1].log_softmax(dim=-1)
    np.testing.assert_allclose(scores.logprobs, logprobs.gather(1, ids[1:, None])[:, 0], atol=2e-3)
    best = logprobs.topk(K, dim=-1)
    np.testing.assert_allclose(scores.top_logprobs, best.values, atol=2e-3)
    same = scores.top_ids == best.indices.numpy()
    assert same[:, 0].mean() > 0.95  # two that are closer than rounding may change places
    chosen = logprobs.gather(1, torch.from_numpy(scores.top_ids.astype(np.int64)))
    np.testing.assert_allclose(scores.top_logprobs, chosen, atol=2e-3)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("budget", [7, 24, 1000])
def test_scores_are_those_of_a_forward_pass_over_the_whole_prompt(kind: str, budget: int) -> None:
    asked = scored_requests(6)
    answers = Rig(make_runner(kind, prefill_tokens_per_step=budget)).run(asked)
    for one in asked:
        assert_models_own(kind, one, answers[one.seq_id])
    assert tokens_of(answers) == tokens_of(
        Rig(make_runner(kind)).run([request(one.seq_id, one.prompt_ids) for one in asked])
    )


def test_a_scored_prompt_takes_nothing_from_the_prefix_cache_and_gives_to_it() -> None:
    ids = np.arange(40) % 17
    rig = Rig(make_runner())
    rig.run([request(0, ids), request(1, ids, prompt_logprobs=K)])
    rig.run([request(2, ids, prompt_logprobs=K)])
    assert [rig.answers[i].cached_tokens for i in (1, 2)] == [0, 0]
    assert_models_own("llama", request(2, ids, prompt_logprobs=K), rig.answers[2])
    fresh = Rig(make_runner())
    fresh.run([request(3, ids, prompt_logprobs=0)])
    assert fresh.run([request(4, ids)])[4].cached_tokens == 36
    assert fresh.answers[3].scores.top_ids.shape == (39, 0)


def test_a_step_scores_a_bounded_number_of_tokens_and_starves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batcher, "SCORED_TOKENS", 16)
    runner = make_runner(prefill_tokens_per_step=1000)
    launch, seen = runner.launch, []

    def counted(plan: Any) -> None:
        seen.append(sum(len(chunk.ids) for chunk in plan.prefill if chunk.targets is not None))
        launch(plan)

    runner.launch = counted  # type: ignore[method-assign]
    asked = scored_requests(8, seed=5)
    answers = Rig(runner).run(asked)
    assert max(seen) == 16
    for one in asked:
        assert_models_own("llama", one, answers[one.seq_id])


@pytest.mark.parametrize("ahead", [0, 2])
def test_preempted_prompts_are_scored_whole(ahead: int) -> None:
    runner = make_runner(num_blocks=40, prefill_tokens_per_step=16)
    rig = Rig(DelayedRunner(runner, ahead) if ahead else runner)
    asked = scored_requests(7, seed=2, max_tokens=40)
    answers = rig.run(asked)
    assert rig.core.load().preemptions > 0
    for one in asked:
        assert_models_own("llama", one, answers[one.seq_id])


def test_a_step_that_failed_scores_nothing_twice() -> None:
    asked = [request(i, [i + 1, *ids], prompt_logprobs=K) for i, ids in enumerate(prompts(5, seed=9, low=20))]
    runner = PoisonedRunner(make_runner(prefill_tokens_per_step=32), 3, lambda slots: RuntimeError("a kernel broke"))
    answers = Rig(runner).run(asked)
    assert answers[2].finish == FinishCode.ERROR
    assert answers[2].scores is None
    for i in (0, 1, 3, 4):
        assert_models_own("llama", asked[i], answers[i])


def test_whoever_is_cancelled_within_its_prompt_is_told_no_scores() -> None:
    rig = Rig(make_runner(prefill_tokens_per_step=8))
    rig.add(request(0, range(60), prompt_logprobs=K))
    rig.step()
    rig.core.cancel([0])
    rig.read()
    assert (rig.answers[0].finish, rig.answers[0].scores) == (FinishCode.CANCELLED, None)


def test_a_prompt_of_one_token_has_no_scores_to_tell() -> None:
    answer = Rig(make_runner()).run([request(0, [5], prompt_logprobs=K)])[0]
    assert isinstance(answer.scores, TokenScores)
    assert answer.scores.top_ids.shape == (0, K)


def test_the_chosen_token_scores_exactly_as_the_same_alternative() -> None:
    """Clients compare the two to see whether a token is the likeliest."""
    logits = torch.randn(2 * ROWS_AT_ONCE + 3, 50, generator=torch.Generator().manual_seed(0)) * 9
    best = logits.argmax(dim=1)
    logprobs, ids, values = score_tokens(logits, best, 2)
    assert torch.equal(logprobs, values[:, 0])
    assert torch.equal(ids[:, 0].long(), best)
    torch.testing.assert_close(values, logits.log_softmax(dim=1).topk(2, dim=1).values)
    assert score_tokens(logits[:, :4], best % 4, 20)[1].shape == (len(best), 4)
