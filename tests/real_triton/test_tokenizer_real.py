"""The model `tokenizer`, called by itself: right ids for whatever comes together, refusals for that text alone."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as grpcclient
from tokenizers import Tokenizer
from tritandem.tokenizer.encode.adversarial import short_texts
from tritonclient.utils import InferenceServerException

from tests.real_triton.raw_client import RawClient, tensor, text
from tests.real_triton.started import demo_model

pytestmark = pytest.mark.triton

LONG = "On the other hand, 12 long sentences make\na prompt of many pieces. "

# Without `refusal`: who asks for that (and for all, by naming none) gets refusals as an answer.
OUTPUTS = [grpcclient.InferRequestedOutput(name) for name in ("input_ids", "tokenized_ns")]


def ids_of(url: str, prompt: str) -> list[int]:
    with grpcclient.InferenceServerClient(url) as client:
        result = client.infer("tokenizer", [tensor("text_input", text(prompt))], outputs=OUTPUTS)
    received_ns, done_ns, *_ = result.as_numpy("tokenized_ns").reshape(-1).tolist()
    assert 0 < received_ns <= done_ns
    return [int(token) for token in result.as_numpy("input_ids").reshape(-1)]


def test_long_and_short_texts_that_come_together_get_the_ids_of_tokenizers(client: RawClient) -> None:
    reference = Tokenizer.from_file(str(demo_model() / "tokenizer.json"))
    prompts = [prompt for prompt in short_texts(random.Random(21), 80) if prompt]
    prompts[::10] = [f"{number}: {LONG * 400}" for number in range(len(prompts[::10]))]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda prompt: ids_of(client.url, prompt), prompts))
    assert min(len(ids) for ids in found[::10]) > 5000
    for prompt, ids in zip(prompts, found, strict=True):
        assert ids == reference.encode(prompt).ids, repr(prompt[:200])


def test_a_text_beyond_the_context_is_refused_and_the_next_one_is_not(client: RawClient) -> None:
    with pytest.raises(InferenceServerException, match=r"text_input: given .*, allowed: at most \d+ tokens"):
        ids_of(client.url, LONG * 3000)
    assert len(ids_of(client.url, "next")) == 1
