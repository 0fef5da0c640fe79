"""The served answer is transformers' own: token for token, whatever else is in the batch."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.real_triton.raw_client import RawClient, number, text
from tests.real_triton.started import demo_model
from tests.real_triton.varied_prompts import PROMPTS

pytestmark = pytest.mark.triton

NEW_TOKENS = 10
TIE = 1e-3  # two sums of the same float32 terms in another order differ by less


class Reference:
    """The same weights in float32 in transformers' own modelling code, one prompt at a time."""

    def __init__(self) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)  # the server has the other cores; threads that wait for each other lose much more
        self._torch = torch
        self._tokenizer = AutoTokenizer.from_pretrained(demo_model(), local_files_only=True)
        self._model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32, local_files_only=True)
        self._model.eval()

    def choices(self, prompt: str, answer: list[int]) -> tuple[list[int], list[float]]:
        """What is likeliest at each step of `answer`, given the prompt and the answer before it, and for each the gap
        between the two best logits. One pass over all of it: as far as the answer is the choice, it is what a greedy
        search finds, and nothing is claimed about the steps after."""
        ids = self._tokenizer(prompt)["input_ids"] + answer[:-1]
        with self._torch.inference_mode():
            made = self._model(self._torch.tensor([ids]), logits_to_keep=len(answer), use_cache=False)
        best = made.logits[0].topk(2)
        return best.indices[:, 0].tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def served_ids(client: RawClient, index: int) -> list[int]:
    """Read off the log-probabilities, whose entries begin with the chosen token's id."""
    arrays: dict[str, Any] = {
        "text_input": text(PROMPTS[index]),
        "max_tokens": number(NEW_TOKENS, np.int32),
        "sampling_parameters": text('{"ignore_eos": true}'),
        "return_logprobs": number(True, np.bool_),
        "stream": number(True, np.bool_),
    }
    results = client.results(("scheduler", "ensemble")[index % 2], arrays, request_id=f"prompt-{index}")
    tokens = [token for result in results for token in json.loads(result.as_numpy("logprobs")[0])]
    return [int(next(iter(token))) for token in tokens]


def test_fifty_prompts_at_once_get_the_greedy_tokens_of_transformers(client: RawClient) -> None:
    assert len(set(PROMPTS)) == 50
    ties, wrong = [], []
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(served_ids, client, index) for index in range(len(PROMPTS))]
        reference = Reference()  # works while the server does
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            served = answer.result()
            assert len(served) == NEW_TOKENS
            expected, gaps = reference.choices(prompt, served)
            step = next((i for i in range(NEW_TOKENS) if served[i] != expected[i]), None)
            if step is not None:
                said = f"{prompt[:40]!r} step {step}: {served[step]} for {expected[step]}, gap {gaps[step]:.1e}"
                (ties if gaps[step] < TIE else wrong).append(said)
    print(f"{len(PROMPTS)} prompts, {len(ties)} differ at a tie", *ties, sep="\n")
    assert not wrong, "\n".join(wrong)
