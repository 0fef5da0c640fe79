"""The sampler agrees with transformers' logits processors, with numpy's arithmetic and with probability."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from tritandem.contracts.fields import FIELDS, SamplingParams
from tritandem.contracts.stream import FinishCode
from tritandem.engine.rows.state import SlotState
from tritandem.engine.sampling import bad_words, filters, noise, penalties, sampler
from tritandem.engine.step import SamplingFeatures, SlotInit

from tests.engine.engine_rig import VOCAB, Rig, generate, make_runner, request

ROWS = torch.arange(3)


def logits(rows: int = 3, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def state_with(params: list[SamplingParams], prompt: Any, output: Any = (), **init: Any) -> SlotState:
    state = SlotState.empty(len(params), 4, VOCAB, "cpu")
    for slot, sampling in enumerate(params):
        values: dict[str, Any] = {"stop_ids": (), "bad_words": (), **init}
        prompt_ids, output_ids = np.asarray(prompt, np.int32), np.asarray(output, np.int32)
        state.init_row(SlotInit(slot, prompt_ids, sampling, output_ids=output_ids, **values), 64)
    return state


def test_repetition_penalty_is_transformers_own() -> None:
    prompt, output = [3, 7, 7, 9], [20, 21]
    state = state_with([SamplingParams(repetition_penalty=p) for p in (1.0, 1.3, 0.7)], prompt, output)
    ours = penalties.penalise(logits(), ROWS, state)
    for row, penalty in enumerate((1.0, 1.3, 0.7)):
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + output]), logits()[row : row + 1])
        torch.testing.assert_close(ours[row], theirs[0])


def test_presence_and_frequency_penalties_count_output_only() -> None:
    state = state_with([SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)], [3, 4], [4, 5, 5])
    expected = logits(1)
    expected[0, 4] -= 0.5 + 0.25
    expected[0, 5] -= 0.5 + 2 * 0.25
    torch.testing.assert_close(penalties.penalise(logits(1), torch.tensor([0]), state), expected)


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [
        (5, 1.0, 0.0),
        (0, 0.7, 0.0),
        (0, 1.0, 0.1),
        (20, 0.8, 0.02),
        (1, 0.5, 0.5),
        (500, 1.0, 0.0),
        (2**31 - 1, 1.0, 0.0),
    ],
)
def test_filters_keep_what_transformers_keeps(top_k: int, top_p: float, min_p: float) -> None:
    warpers = LogitsProcessorList()
    if top_k:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    if min_p:
        warpers.append(MinPLogitsWarper(min_p))
    theirs = warpers(torch.zeros(3, 1, dtype=torch.long), logits())
    ours = filters.keep_likely(
        logits(), torch.tensor([top_k] * 3), torch.tensor([top_p] * 3), torch.tensor([min_p] * 3)
    )
    torch.testing.assert_close(ours, theirs)


def test_tokens_that_tie_with_the_last_kept_one_are_kept() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]])
    kept = filters.keep_likely(scores, torch.tensor([2]), torch.tensor([1.0]), torch.tensor([0.0]))
    assert torch.isfinite(kept).tolist() == [[False, True, True, True, False]]


def test_bad_words_are_transformers_own() -> None:
    words, context = [[5], [8, 9], [1, 2, 3, 4]], [0, 1, 2, 3]
    for tail in ([], [8], [1, 2, 3]):
        ids = context[:1] + tail if tail else context[:1]
        state = state_with([SamplingParams()], ids, bad_words=tuple(map(tuple, words)))
        theirs = NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([130]))(torch.tensor([ids]), logits(1))
        torch.testing.assert_close(bad_words.mask_bad_words(logits(1), torch.tensor([0]), state), theirs)


def test_bad_words_never_appear_in_the_answer() -> None:
    free = generate("llama", range(9), 12)
    banned = ((free[2],), (free[4], free[5]))
    tokens = Rig(make_runner()).run([request(0, range(9), bad_words=banned)])[0].tokens
    assert free[2] not in tokens
    assert (free[4], free[5]) not in itertools.pairwise(tokens)
    assert tokens[:2] == free[:2]


def test_min_tokens_holds_end_tokens_back() -> None:
    free = generate("llama", range(9), 12)
    answer = Rig(make_runner()).run([request(0, range(9), stop_ids=tuple(set(free)), min_tokens=6)])[0]
    assert len(answer.tokens) >= 7
    assert not set(answer.tokens[:6]) & set(free)
    at_once = Rig(make_runner()).run([request(0, range(9), stop_ids=(free[0],))])[0]
    assert at_once.tokens == free[:1]
    assert at_once.finish == FinishCode.STOP


@pytest.mark.parametrize("way", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_one_logit_that_is_not_finite_breaks_its_row_and_no_other(
    way: dict[str, float], temperature: float, wrong: float
) -> None:
    asked = SamplingParams(temperature=temperature, **way)  # type: ignore[arg-type]
    state, features = state_with([asked] * 3, [1]), SamplingFeatures(asked.features)
    bad = logits()
    bad[1, 77] = wrong
    sampled, sound = (sampler.sample(scores, ROWS, state, features) for scores in (bad, logits()))
    assert sampled.broken.tolist() == [False, True, False]
    assert sampled.tokens[[0, 2]].tolist() == sound.tokens[[0, 2]].tolist()


def test_a_row_whose_every_token_is_forbidden_is_broken() -> None:
    state = state_with([SamplingParams()] * 3, [1], bad_words=tuple((token,) for token in range(5)))
    only_bad = logits()
    only_bad[:, 5:] = float("-inf")
    assert sampler.sample(only_bad, ROWS, state, SamplingFeatures(frozenset({"bad_words"}))).broken.all()


def test_the_sampler_has_every_feature_that_a_field_asks_for() -> None:
    known = {name for name, _ in (*sampler.CHOICE, *sampler.DRAW)} | {"sampled"}
    assert {fact.feature for fact in FIELDS.values()} <= known
    assert SamplingParams().features == frozenset()
    assert SamplingParams(temperature=0.5, min_p=0.1).features == {"sampled", "filtered"}
    assert SamplingParams(presence_penalty=1.0).features == {"penalised"}


def test_what_concerns_draws_alone_costs_a_greedy_request_nothing() -> None:
    asked = SamplingParams(top_k=5, top_p=0.5, min_p=0.1, seed=7)
    assert asked.features == frozenset()
    rig = Rig(make_runner())
    rig.add(request(0, range(9), top_k=5, seed=7), request(1, range(9), top_p=0.5))
    assert all(sequence.plain for sequence in rig.core.waiting)
    answers = rig.run([])
    assert answers[0].tokens == answers[1].tokens == generate("llama", range(9), 12)


def test_logprobs_are_of_the_raw_logits() -> None:
    plain = Rig(make_runner()).run([request(0, range(9), logprobs=4)])[0]
    warm = Rig(make_runner()).run([request(0, range(9), logprobs=4, temperature=3.0, seed=1, max_tokens=1)])[0]
    assert warm.top_ids[0] == plain.top_ids[0]
    assert [ids[0] for ids in plain.top_ids] == plain.tokens
    features = SamplingFeatures(top_logprobs=2)
    sampled = sampler.sample(logits(), ROWS, state_with([SamplingParams()] * 3, [1]), features)
    assert sampled.logprobs is not None
    assert sampled.top_logprobs is not None
    expected = logits().log_softmax(-1)
    torch.testing.assert_close(sampled.logprobs, expected.amax(-1))
    torch.testing.assert_close(sampled.top_logprobs, expected.topk(2).values)


def test_the_hash_is_splitmix64() -> None:
    def mix(x: int) -> int:
        mask = (1 << 64) - 1
        x &= mask
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    values = [0, 1, -1, 123456789, 2**63 - 1, -(2**63)]
    ours = noise.mix64(torch.tensor(values, dtype=torch.int64)).tolist()
    assert [value & (2**64 - 1) for value in ours] == [mix(value) for value in values]


def test_noise_draws_from_the_softmax() -> None:
    scores, draws = logits(1)[0, :8], 20_000
    drawn = noise.gumbel_noise(torch.full((draws,), 42), torch.arange(draws), 8)
    counts = torch.bincount((scores + drawn).argmax(-1), minlength=8).double()
    expected = scores.double().softmax(-1) * draws
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 24.3  # 7 degrees of freedom, one in a thousand
    assert torch.isfinite(drawn).all()


def test_seeds_and_indices_give_unrelated_noise() -> None:
    drawn = noise.gumbel_noise(torch.arange(64), torch.arange(64) % 2, VOCAB)
    correlation = torch.corrcoef(drawn) - torch.eye(64)
    assert float(correlation.abs().max()) < 0.5
    assert torch.equal(drawn[5], noise.gumbel_noise(torch.tensor([5]), torch.tensor([1]), VOCAB)[0])


def test_greedy_and_sampled_rows_share_a_batch() -> None:
    state = state_with([SamplingParams(), SamplingParams(temperature=5.0, seed=3), SamplingParams()], [1])
    tokens = sampler.sample(logits(), ROWS, state, SamplingFeatures(frozenset({"sampled"}))).tokens
    assert tokens[[0, 2]].tolist() == logits().argmax(-1)[[0, 2]].tolist()
    assert tokens[1] != logits().argmax(-1)[1]


def test_rows_with_logits_that_are_not_finite_are_marked() -> None:
    broken = logits()
    broken[1, 4] = float("nan")
    marks = sampler.sample(broken, ROWS, state_with([SamplingParams()] * 3, [1]), SamplingFeatures()).broken
    assert marks.tolist() == [False, True, False]
