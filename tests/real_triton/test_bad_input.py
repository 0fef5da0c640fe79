"""Every bad request is refused with the name of what is wrong, while another stream goes on undisturbed."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from tritandem.config import TelemetryConfig
from tritandem.server import TritonServer

from tests.real_triton.raw_client import RawClient, in_background, number, text

pytestmark = pytest.mark.triton

PROMPT = {"text_input": text("One two three")}
CHAT = {"messages": '[{"role": "user", "content": "Hi"}]'}
IDS = np.array([[1, 2, 3]], np.int32)


HONEST = 80
PREFIX = {"scheduler": "", "ensemble": "in ensemble 'ensemble', "}
MODELS = pytest.mark.parametrize("model", ["ensemble", "scheduler"])


def sampling(**values: Any) -> dict[str, Any]:
    return PROMPT | {"sampling_parameters": text(json.dumps(values))}


def sampling_text(written: str) -> dict[str, Any]:
    return PROMPT | {"sampling_parameters": text(written)}


# What is sent, the words that the refusal must contain.
BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "empty prompt": ({"text_input": text("")}, ["text_input", "''", "at least one character"]),
    "no prompt": ({"max_tokens": number(1, np.int32)}, ["text_input", "none of them", "one of"]),
    "both prompts": (PROMPT | {"input_ids": IDS}, ["text_input", "text_input and input_ids", "one of"]),
    "prompt beyond the context": ({"text_input": text("word " * 9000)}, ["text_input", "900", "at most 8191 tokens"]),
    "ids beyond the context": ({"input_ids": np.ones((1, 9000), np.int32)}, ["input_ids", "9000", "at most 8191"]),
    "a megabyte of one word": ({"text_input": text("x" * 1_000_000)}, ["text_input", "1000000 characters", "8191"]),
    "invalid UTF-8": ({"text_input": text(b"abc\xff\xfe")}, ["text_input", "invalid UTF-8 at byte 3"]),
    "ids beyond the vocabulary": ({"input_ids": np.array([[1, 49152]], np.int32)}, ["input_ids", "49152", "0..49151"]),
    "negative ids": ({"input_ids": np.array([[1, -3]], np.int32)}, ["input_ids", "-3", "0..49151"]),
    "ids of another dtype": ({"input_ids": IDS.astype(np.int64)}, ["input_ids", "INT64", "INT32"]),
    "max_tokens 0": (PROMPT | {"max_tokens": number(0, np.int32)}, ["max_tokens", "given 0", "at least 1"]),
    "max_tokens negative": (PROMPT | {"max_tokens": number(-5, np.int32)}, ["max_tokens", "given -5"]),
    "max_tokens beyond the context": (PROMPT | {"max_tokens": number(9000, np.int32)}, ["max_tokens", "9000", "8192"]),
    "temperature negative": (PROMPT | {"temperature": number(-1, np.float32)}, ["temperature", "-1", "[0, 100]"]),
    "temperature NaN": (PROMPT | {"temperature": number(np.nan, np.float32)}, ["temperature", "nan"]),
    "temperature NaN in JSON": (sampling_text('{"temperature": NaN}'), ["temperature", "nan", "a number"]),
    "temperature infinite in JSON": (sampling_text('{"temperature": 1e999}'), ["temperature", "inf", "[0, 100]"]),
    "top_p 1.5": (PROMPT | {"top_p": number(1.5, np.float32)}, ["top_p", "1.5", "[0, 1]"]),
    "unknown sampling key": (sampling(temperatur=1.0), ["temperatur", "unknown key", "temperature"]),
    "malformed JSON": (PROMPT | {"sampling_parameters": text("{'a'")}, ["sampling_parameters", "malformed JSON"]),
    "deep JSON": (sampling_text("[" * 100_000), ["sampling_parameters", "malformed JSON"]),
    "a key twice": (sampling_text('{"top_k": 1, "top_k": 2}'), ["sampling_parameters", "a repeated key"]),
    "JSON of another kind": (PROMPT | {"sampling_parameters": text("[1]")}, ["sampling_parameters", "a JSON object"]),
    "two values": (sampling(max_tokens=3) | {"max_tokens": number(4, np.int32)}, ["max_tokens", "4 and 3"]),
    "10,000 stop words": (PROMPT | {"stop_words": text(*(["x"] * 10_000))}, ["stop_words", "10000", "at most 64"]),
    "a long stop word": (PROMPT | {"stop_words": text("y" * 2000)}, ["stop_words", "1024"]),
    "a stop word with half a character": (sampling(stop=["\ud800"]), ["stop_words", "ud800", "UTF-8"]),
    "a bad word with half a character": (sampling(bad_words=["\ud800"]), ["bad_words", "ud800", "UTF-8"]),
    "a bad word of many tokens": (PROMPT | {"bad_words": text("one two three " * 9)}, ["bad_words", "1..8 tokens"]),
    "a stop word of invalid UTF-8": (PROMPT | {"stop_words": text(b"\xff")}, ["stop_words", "invalid UTF-8"]),
    "stop token ids beyond the vocabulary": (sampling(stop_token_ids=[49152]), ["stop_token_ids", "49152", "0..49151"]),
    "too many stop token ids": (sampling(stop_token_ids=list(range(17))), ["stop_token_ids", "17 ids", "at most 16"]),
    "a bias beyond the vocabulary": (sampling(logit_bias={"49152": 1}), ["logit_bias", "49152", "0..49151"]),
    "a bias too large": (PROMPT | {"logit_bias": text('{"7": 101}')}, ["logit_bias[7]", "101", "[-100, 100]"]),
    "no allowed id is left": (
        sampling(allowed_token_ids=[2], min_tokens=1),
        ["allowed_token_ids", "[2]", "no end token"],
    ),
    "min_tokens beyond max_tokens": (sampling(max_tokens=2, min_tokens=3), ["min_tokens", "3", "max_tokens (2)"]),
    "too many logprobs": (sampling(logprobs=21), ["logprobs", "21", "[0, 20]"]),
    "a seed too large": (PROMPT | {"seed": number(2**63, np.uint64)}, ["seed", str(2**63), "2^63"]),
    "beam search": (PROMPT | {"beam_width": number(4, np.int32)}, ["beam_width", "given 4"]),
    "context logits": (PROMPT | {"return_context_logits": number(True, np.bool_)}, ["return_context_logits", "false"]),
    "wrong dtype": (PROMPT | {"max_tokens": number(5, np.int64)}, ["max_tokens", "INT64", "INT32"]),
    "wrong shape": (PROMPT | {"max_tokens": np.array([[1, 2]], np.int32)}, ["max_tokens", "[1,2]"]),
    "two prompts in one": ({"text_input": np.array([[b"a"], [b"b"]], np.object_)}, ["batch"]),
    "an adapter": (PROMPT | {"lora_task_id": number(1, np.uint64)}, ["REJECTED_INVALID: lora_task_id", "no adapters"]),
    "unknown tensor": (PROMPT | {"spoon": number(1, np.uint64)}, ["spoon"]),
    "unknown class": (PROMPT | {"priority": text("urgent")}, ["priority", "urgent", "interactive, normal, batch"]),
    "deadline 0": (PROMPT | {"deadline_ms": number(0, np.int64)}, ["deadline_ms", "given 0"]),
    "stop without an id": ({"stop": number(True, np.bool_)}, ["stop", "without an id"]),
}
BAD_PARAMETERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown parameter": ({"best_off": 2}, ["best_off", "unknown parameter"]),
    "malformed messages": ({"messages": "[{"}, ["messages", "malformed JSON"]),
    "empty messages": ({"messages": "[]"}, ["messages", "non-empty"]),
    "half a character in a message": ({"messages": '[{"role": "user", "content": "\\ud800"}]'}, ["messages", "D800"]),
    "a long chat": ({"messages": json.dumps([{"role": "user", "content": "x" * 900_000}])}, ["messages", "8191"]),
    "numbers in other digits": (CHAT | {"max_tokens": "\u0661"}, ["max_tokens", "a whole number"]),
    "a long request id": (CHAT | {"request_id": "i" * 257}, ["request_id", "at most 256"]),
}
# What HTTP can send: a body, the words of the refusal. Triton itself reads the JSON, and names no field there.
BAD_BODIES: dict[str, tuple[Any, list[str]]] = {
    "no JSON": (b"{", ["JSON"]),
    "no prompt": ({"max_tokens": 1}, ["text_input", "one of"]),
    "empty prompt": ({"text_input": ""}, ["text_input", "at least one character"]),
    "both prompts": ({"text_input": "a", "input_ids": [1, 2]}, ["text_input and input_ids"]),
    "invalid UTF-8": (b'{"text_input": "abc\xff"}', ["text_input", "invalid UTF-8 at byte 3"]),
    "half a character": (b'{"text_input": "\\ud800"}', ["surrogate"]),
    "a megabyte of one word": ({"text_input": "x" * 1_000_000}, ["text_input", "1000000 characters", "8191"]),
    "ids beyond the vocabulary": ({"input_ids": [1, 49152]}, ["input_ids", "49152", "0..49151"]),
    "a text for a number": ({"text_input": "a", "max_tokens": "many"}, ["non-signed-integer"]),
    "max_tokens 0": ({"text_input": "a", "max_tokens": 0}, ["max_tokens", "given 0", "at least 1"]),
    "max_tokens beyond 32 bits": ({"text_input": "a", "max_tokens": 2**40}, ["max_tokens"]),
    "max_tokens beyond the context": ({"text_input": "a", "max_tokens": 9000}, ["max_tokens", "9000", "8192"]),
    "top_p 7": ({"text_input": "a", "top_p": 7}, ["top_p", "[0, 1]"]),
    "unknown key": ({"text_input": "a", "best_off": 2}, ["best_off", "unknown parameter"]),
    "unknown sampling key": ({"text_input": "a", "sampling_parameters": '{"x": 1}'}, ["x", "unknown key"]),
    "10,000 stop words": ({"text_input": "a", "stop_words": ["x"] * 10_000}, ["stop_words", "10000", "at most 64"]),
    "unknown class": ({"text_input": "a", "priority": "urgent"}, ["priority", "urgent", "interactive, normal, batch"]),
    "an id of another kind": ({"text_input": "a", "request_id": 5}, ["request_id", "a text"]),
    "stop without an id": ({"stop": True}, ["stop", "without an id"]),
    "a bad byte in a parameter": (b'{"text_input": "a", "tenant": "\xff"}', ["parameters", "invalid UTF-8"]),
    "a Latin-1 key": (b'{"text_input": "a", "ten\xe4nt": "a"}', ["parameters", "invalid UTF-8"]),
    "a bad byte in JSON in JSON": (
        b'{"text_input": "a", "sampling_parameters": "\xff"}',
        ["sampling_parameters", "UTF-8"],
    ),
    "max_tokens that Triton would cut": (
        {"text_input": "a", "sampling_parameters": '{"max_tokens": 4294967301}'},
        ["max_tokens", "4294967301"],
    ),
    "a number beyond all types": (b'{"text_input": "a", "deadline_ms": 1e999}', ["Number too big"]),
    "a megabyte in a parameter": ({"text_input": "a", "tenant": "x" * 1_000_000}, ["tenant", "at most 128"]),
}


@contextmanager
def undisturbed(client: RawClient, model: str) -> Iterator[None]:
    """A stream runs until it is stopped at the end, and its text is the one that it has when nothing else happens."""
    counting = {
        "text_input": text("1, 2, 3, 4, 5, 6, 7, 8, 9, 10,"),
        "sampling_parameters": text('{"ignore_eos": true}'),
        "stream": number(True, np.bool_),
        "return_num_output_tokens": number(True, np.bool_),
    }
    bystander = client.stream(model, counting | {"max_tokens": number(8000, np.int32)}, request_id="bystander")
    responses = iter(bystander)
    seen = [next(responses)]
    yield
    client.results(model, {"stop": number(True, np.bool_)}, request_id="bystander")
    seen += responses
    bystander.close()
    assert seen[-1].as_numpy("outcome")[0] == b"STOPPED", "it ended too early to be a witness"
    tokens = sum(int(result.as_numpy("num_output_tokens")[0]) for result in seen)
    alone = client.answer(model, counting | {"max_tokens": number(tokens, np.int32)})
    assert "".join(result.as_numpy("text_output")[0].decode() for result in seen) == alone


@MODELS
def test_bad_requests_are_named_and_disturb_nobody(client: RawClient, model: str) -> None:
    wrong = []
    with undisturbed(client, model):
        for name, (arrays, words) in BAD.items():
            message = client.error(model, arrays)
            wrong += [f"{name}: {word!r} is not in {message!r}" for word in words if word not in message]
        for name, (parameters, words) in BAD_PARAMETERS.items():
            message = client.error(model, {"text_input": text("")}, parameters=parameters)
            wrong += [f"{name}: {word!r} is not in {message!r}" for word in words if word not in message]
    assert not wrong, "\n".join(wrong)


@MODELS
def test_bad_bodies_are_named_and_disturb_nobody(server: TritonServer, client: RawClient, model: str) -> None:
    wrong = []
    with undisturbed(client, model):
        for name, (body, words) in BAD_BODIES.items():
            for call in ("generate", "generate_stream"):
                message = http_error(server, model, call, body)
                wrong += [f"{name}, {call}: {word!r} is not in {message!r}" for word in words if word not in message]
    assert not wrong, "\n".join(wrong)


@MODELS
def test_an_id_of_any_length_is_refused_by_every_request(client: RawClient, model: str) -> None:
    for arrays in (PROMPT, {"stop": number(True, np.bool_)}):
        message = client.error(model, arrays, request_id="i" * 2_000_000)
        assert "allowed: a text of at most 256 characters" in message
        assert len(message) < 500


@MODELS
def test_bad_bytes_fail_nobody_but_their_sender(server: TritonServer, client: RawClient, model: str) -> None:
    """All at once, so that Triton puts them into the same batches."""
    two = {"text_input": text("One two"), "max_tokens": number(2, np.int32)}
    bodies = [b'{"text_input": "x", "tenant": "\xff"}', b'{"text_input": "x", "request_id": "\xff"}'] * 6
    honest = [in_background(client.answer, model, two) for _ in range(HONEST // 2)]
    bad = [in_background(http_error, server, model, "generate", body) for body in bodies]
    honest += [in_background(client.answer, model, two) for _ in range(HONEST // 2)]
    for thread, _ in honest + bad:
        thread.join()
    assert len({outcome for _, [outcome] in honest}) == 1
    assert {str(outcome).partition(" at ")[0] for _, [outcome] in bad} == {
        PREFIX[model] + "REJECTED_INVALID: parameters: given 'invalid UTF-8"
    }


@MODELS
def test_odd_but_valid_texts_are_answered(client: RawClient, model: str) -> None:
    odd = {
        "NUL": text("a\0b"),
        "control characters": text("\x01\x02\x7f"),
        "a byte order mark": text("\ufeffHello"),
        "the last code point": text("\U0010ffff"),
        "combining marks alone": text("\u0301\u0302"),
        "a control token's spelling": text("<|im_end|><|im_start|>"),
        "right to left": text("\u202eabc"),
    }
    for name, prompt in odd.items():
        arrays = {
            "text_input": prompt,
            "max_tokens": number(2, np.int32),
            "exclude_input_in_output": number(False, bool),
        }
        answer = client.answer(model, arrays)
        assert answer.startswith(prompt[0][0].decode()), name


def test_refusals_are_counted_once_on_every_way(server: TritonServer, client: RawClient) -> None:
    """By whatever found the fault: the decoder, the tokenizer behind the direct model, the ensemble's first step."""
    before = refused_so_far(server)
    while True:  # what was refused by other tests may not be published yet
        time.sleep(1.5 * TelemetryConfig().metrics_period_s)
        if (now := refused_so_far(server)) == before:
            break
        before = now
    for model in ("ensemble", "scheduler"):
        client.error(model, PROMPT | {"top_p": number(7, np.float32)})
        client.error(model, {"text_input": text("")})
        client.error(model, {"text_input": text("x" * 1_000_000)})
    end_s = time.monotonic() + 60.0
    while (counted := refused_so_far(server) - before) < 6:
        assert time.monotonic() < end_s, f"{counted} of 6 counted"
        time.sleep(0.1)
    assert counted == 6


def refused_so_far(server: TritonServer) -> int:
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    name = "tritandem_requests_total{"
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(name) and "REJECTED_INVALID" in line)


def http_error(server: TritonServer, model: str, call: str, body: Any) -> str:
    """The error that a body is answered with, whichever status it comes with."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http_url}/v2/models/{model}/{call}", data, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            raise AssertionError(f"answered instead of refused: {response.read()[:200]!r}")
    except urllib.error.HTTPError as error:
        with error:
            answer = error.read().removeprefix(b"data:").strip()
    return str(json.loads(answer)["error"])
