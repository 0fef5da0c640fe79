"""Bias of single tokens and lists of allowed ones: transformers' arithmetic, alone and with everything else."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor
from tritandem.contracts.errors import InvalidRequest
from tritandem.contracts.fields import MAX_ALLOWED_TOKEN_IDS, MAX_LOGIT_BIAS, SamplingParams
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode
from tritandem.engine.host.sequence import features_of
from tritandem.engine.host.validation import validate
from tritandem.engine.rows.state import SlotState
from tritandem.engine.sampling import allowed_tokens, logit_bias, sampler
from tritandem.engine.step import SamplingFeatures, SlotInit

from tests.engine.engine_rig import VOCAB, Answer, Rig, generate, make_runner, prompts, reference_model, request

ROWS = torch.arange(2)
ROUNDING_GAP = 1e-3


def logits() -> torch.Tensor:
    return torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def state_of(*inits: dict[str, Any]) -> SlotState:
    """Two slots; later inits take the first one again."""
    state = SlotState.empty(2, 4, VOCAB, "cpu")
    prompt, nothing = np.array([3, 7, 7, 9], np.int32), np.zeros(0, np.int32)
    for number, init in enumerate(inits):
        values: dict[str, Any] = {"sampling": SamplingParams(), "stop_ids": (), "bad_words": (), **init}
        state.init_row(SlotInit((0, 1, 0)[number], prompt, output_ids=nothing, **values), 64)
    return state


def test_bias_is_transformers_own_and_comes_before_penalties() -> None:
    pairs, asked = ((0, -100.0), (7, 3.5), (9, -2.25), (130, 100.0)), SamplingParams(repetition_penalty=1.3)
    state = state_of({"logit_bias": pairs, "sampling": asked}, {})
    features = SamplingFeatures(frozenset({"logit_bias", "penalised"}), top_logprobs=0)
    prompt = torch.tensor([[3, 7, 7, 9]])
    theirs = SequenceBiasLogitsProcessor([[[token], value] for token, value in pairs])(prompt, logits()[:1].clone())
    torch.testing.assert_close(logit_bias.add_bias(logits(), ROWS, state)[:1], theirs)
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(prompt, theirs)
    sampled = sampler.sample(logits(), ROWS, state, features)
    assert sampled.tokens.tolist() == [int(theirs.argmax()), int(logits()[1].argmax())]
    assert sampled.logprobs is not None
    expected = logits().log_softmax(-1).gather(1, sampled.tokens[:, None])[:, 0]
    torch.testing.assert_close(sampled.logprobs, expected, msg="they are the model's own")


def test_what_an_earlier_owner_of_a_row_left_changes_nothing() -> None:
    many = tuple((token, -50.0) for token in range(100))
    state = state_of({"logit_bias": many, "allowed_token_ids": tuple(range(90))}, {}, {"logit_bias": ((5, 1.0),)})
    expected = logits()
    expected[0, 5] += 1
    torch.testing.assert_close(logit_bias.add_bias(logits(), ROWS, state), expected)
    assert torch.equal(allowed_tokens.keep_allowed(logits(), ROWS, state), logits())


def test_only_allowed_ids_keep_their_scores() -> None:
    scores = allowed_tokens.keep_allowed(logits(), ROWS, state_of({"allowed_token_ids": (130, 0, 4)}, {}))
    assert torch.isfinite(scores[0]).nonzero()[:, 0].tolist() == [0, 4, 130]
    assert torch.equal(scores[0, [0, 4, 130]], logits()[0, [0, 4, 130]])
    assert torch.equal(scores[1], logits()[1])


def test_broken_logits_stay_broken_beside_the_allowed_ids() -> None:
    broken = logits()
    broken[0, 77] = float("nan")
    state = state_of({"allowed_token_ids": (1, 2)}, {})
    features = SamplingFeatures(frozenset({"allowed_token_ids"}))
    assert sampler.sample(broken, ROWS, state, features).broken.tolist() == [True, False]


def test_a_batch_without_them_takes_no_other_way() -> None:
    rig = Rig(make_runner())
    rig.add(request(0, range(9)), request(1, range(9), logit_bias=((1, 2.0),), allowed_token_ids=(1, 2)))
    plain, asked = rig.core.waiting
    assert features_of([plain]) == SamplingFeatures()
    assert features_of([asked]).asked == {"logit_bias", "allowed_token_ids"}


def scores_of(asked: EngineRequest, tokens: list[int]) -> torch.Tensor:
    """What transformers' logits say of each token of an answer [n, V], after the rules, written one by one."""
    prompt, sampling = asked.prompt_ids.tolist(), asked.sampling
    with torch.no_grad():
        scores = reference_model("llama")(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :].clone()
    for number, row in enumerate(scores):
        past = tokens[:number]
        for token, value in asked.logit_bias:
            row[token] += value
        for token in set(prompt + past):
            row[token] *= 1 / sampling.repetition_penalty if row[token] > 0 else sampling.repetition_penalty
        for token in set(past):
            row[token] -= sampling.presence_penalty + past.count(token) * sampling.frequency_penalty
        forbidden = set(range(VOCAB)) - set(asked.allowed_token_ids or range(VOCAB))
        forbidden |= set(asked.stop_ids) if number < sampling.min_tokens else set()
        for *head, last in asked.bad_words:
            forbidden |= {last} if (prompt + past)[len(prompt + past) - len(head) :] == head else set()
        row[list(forbidden)] = float("-inf")
    return scores


def assert_right(asked: EngineRequest, answer: Answer) -> None:
    """Every token is the best one, or ties with it."""
    scores = scores_of(asked, answer.tokens)
    chosen = scores.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert float((scores.amax(dim=1) - chosen).max()) < ROUNDING_GAP, asked
    ended = answer.tokens[-1] in asked.stop_ids
    assert answer.finish == (FinishCode.STOP if ended else FinishCode.LENGTH)
    assert ended or len(answer.tokens) == asked.sampling.max_tokens


def some_request(seq_id: int, rng: random.Random, shared: list[int], **sampling: Any) -> EngineRequest:
    """Any of the rules with any other; long lists and short ones."""

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.sample(range(VOCAB), rng.randint(1, most)))

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if rng.random() < 0.6 else otherwise

    while True:
        made = request(
            seq_id,
            [*sometimes(shared, []), *ids(20)],
            stop_ids=sometimes(ids(6), ()),
            bad_words=sometimes(tuple((*ids(2), *ids(2))[:3] for _ in range(4)), ()),
            logit_bias=sometimes(tuple((i, rng.choice((-100.0, rng.uniform(-4, 4)))) for i in ids(VOCAB)), ()),
            allowed_token_ids=sometimes(ids(rng.choice((3, VOCAB))), ()),
            max_tokens=24,
            min_tokens=sometimes(6, 0),
            repetition_penalty=sometimes(1.3, 1.0),
            presence_penalty=sometimes(0.7, 0.0),
            frequency_penalty=sometimes(0.4, 0.0),
            logprobs=sometimes(2, None),
            **sampling,
        )
        try:
            validate(made, make_runner().spec)
        except InvalidRequest:
            continue
        return made


def test_every_mixture_gives_what_transformers_and_the_rules_say() -> None:
    """A random walk: arrivals and cancellations, prefix hits, and preemptions for want of blocks."""
    rng = random.Random(5)
    shared = prompts(1, seed=4, low=17, high=18)[0].tolist()
    asked = [some_request(i, rng, shared) for i in range(40)]
    rig, left, cancelled = Rig(make_runner(num_blocks=30, prefill_tokens_per_step=16)), asked[::-1], set()
    while left or not rig.core.idle():
        if left and rng.random() < 0.5:
            rig.add(left.pop())
        if rng.random() < 0.03 and rig.core.live_ids():
            cancelled.add(rng.choice(rig.core.live_ids()))
            rig.core.cancel(cancelled)
        rig.step()
    rig.read()
    load = rig.core.load()
    assert load.preemptions > 0
    assert load.prefix_hit_tokens > 0
    answered = [one for one in asked if rig.answers[one.seq_id].finish != FinishCode.CANCELLED]
    assert len(answered) > 25
    for one in answered:
        assert_right(one, rig.answers[one.seq_id])


def test_a_seeded_draw_is_the_same_alone_and_in_a_crowd() -> None:
    rng = random.Random(7)
    shared = prompts(1, seed=4, low=17, high=18)[0].tolist()
    asked = [some_request(i, rng, shared, temperature=1.5, top_k=9, seed=i) for i in range(8)]
    crowd = Rig(make_runner(num_blocks=30)).run(asked)
    for one in asked:
        assert Rig(make_runner()).run([one])[one.seq_id].tokens == crowd[one.seq_id].tokens
        assert not set(crowd[one.seq_id].tokens) - set(one.allowed_token_ids or range(VOCAB))


def test_a_bias_of_100_forces_a_token_and_of_minus_100_bans_it() -> None:
    free = generate("llama", range(9), 4)
    forced, banned = (
        Rig(make_runner()).run([request(0, range(9), max_tokens=4, logit_bias=((free[0], value),))])[0].tokens
        for value in (100.0, -100.0)
    )
    assert forced == [free[0]] * 4
    assert free[0] not in banned


ONE = request(1, [1])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, f"logit_bias: given {VOCAB}, allowed: ids in 0..{VOCAB - 1}"),
        ({"logit_bias": ((-1, 1.0),)}, "logit_bias: given -1"),
        ({"logit_bias": ((3, 100.5),)}, "logit_bias[3]: given 100.5, allowed: a number in [-100, 100]"),
        ({"logit_bias": ((3, float("nan")),)}, "logit_bias[3]: given nan"),
        ({"logit_bias": ((3, 1.0),) * (MAX_LOGIT_BIAS + 1)}, "logit_bias: given '301 ids', allowed: at most 300"),
        ({"allowed_token_ids": (4, VOCAB)}, f"allowed_token_ids: given {VOCAB}"),
        ({"allowed_token_ids": (4,) * (MAX_ALLOWED_TOKEN_IDS + 1)}, "allowed_token_ids: given '1025 ids'"),
        ({"allowed_token_ids": (4, 5), "bad_words": ((4,), (8, 5))}, "allowed_token_ids: given [4, 5]"),
        ({"allowed_token_ids": (4,), "stop_ids": (4,), "sampling": SamplingParams(min_tokens=1)}, "with min_tokens"),
    ],
)
def test_what_leaves_no_choice_or_names_no_token_is_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate(replace(ONE, **wrong), make_runner().spec)
    assert words in str(caught.value)


def test_an_allowed_end_token_ends() -> None:
    answer = Rig(make_runner()).run([request(0, range(9), stop_ids=(4,), allowed_token_ids=(4,))])[0]
    assert (answer.tokens, answer.finish) == ([4], FinishCode.STOP)
