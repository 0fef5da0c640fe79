"""Requests without a seed draw as independently as requests with different ones; a seed fixes the text."""

from __future__ import annotations

import random
import secrets
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from tritandem.contracts.requests import EngineRequest, PriorityClass
from tritandem.triton_io.request.decoder import ModelLimits, complete, decode
from tritandem.triton_io.request.tensor_values import Inputs

from tests.engine.engine_rig import VOCAB, Rig, make_runner, prompts

LIMITS = ModelLimits(256, VOCAB, (), 12, PriorityClass.NORMAL, 0.0, lambda word: [3], str, {})
# So hot that a tiny model's first words are nearly uniform over its 131 tokens: of 25 independent ones, 300 / 131 = 2.3
# pairs are equal on average. The number of equal pairs is close to Poisson's, which exceeds 12 once in 300,000 times.
HOT, EQUAL_PAIRS_AT_MOST = 100.0, 12


def engine_request(seq_id: int, ids: Any, **values: Any) -> EngineRequest:
    """As a client's request reaches the engine; the tensors are of shape [1, 1]."""
    tensors = {name: np.array([[value]]) for name, value in values.items()}
    draft = decode(str(seq_id), Inputs({"input_ids": np.asarray([ids], np.int32), **tensors}), {}, received_ns=1)
    made = complete(draft, np.asarray(ids, np.int32), 2, LIMITS)
    lists = (made.stop_ids, made.bad_words, made.logit_bias, made.allowed_token_ids)
    return EngineRequest(seq_id, made.input_ids, made.sampling, *lists)


def test_first_words_without_a_seed_are_as_varied_as_with_different_seeds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "randbits", random.Random(1).getrandbits)  # the test is the same every time
    hot, one = np.float32(HOT), np.int32(1)
    batch = [engine_request(i, ids, temperature=hot, max_tokens=one) for i, ids in enumerate(prompts(25, seed=3))]
    answers = Rig(make_runner()).run(batch)
    firsts = [answers[i].tokens[0] for i in range(25)]
    assert sum(a == b for a, b in combinations(firsts, 2)) <= EQUAL_PAIRS_AT_MOST


def test_the_same_prompt_is_answered_differently_unless_its_seed_says_otherwise() -> None:
    prompt = prompts(1, seed=5)[0]
    unseeded = [engine_request(i, prompt, temperature=np.float32(1.0)) for i in range(5)]
    seeded = [engine_request(i, prompt, seed=np.uint64(0)) for i in range(5, 8)]
    answers = Rig(make_runner()).run([*unseeded, *seeded])
    assert len({tuple(answers[i].tokens) for i in range(5)}) == 5
    assert len({tuple(answers[i].tokens) for i in range(5, 8)}) == 1
    assert Rig(make_runner()).run(seeded[:1])[5].tokens == answers[5].tokens, "whatever else runs beside it"


def test_a_preempted_sequence_without_a_seed_keeps_the_one_it_was_given() -> None:
    batch = [
        engine_request(i, ids, temperature=np.float32(1.0), max_tokens=np.int32(24))
        for i, ids in enumerate(prompts(6, seed=8, low=3, high=30))
    ]
    roomy = Rig(make_runner()).run(batch)
    rig = Rig(make_runner(num_blocks=28, prefill_tokens_per_step=16))
    cramped = rig.run(batch)
    assert rig.core.load().preemptions > 0
    assert {i: answer.tokens for i, answer in cramped.items()} == {i: answer.tokens for i, answer in roomy.items()}
