"""Every bad request is refused with the name of what is wrong, while another stream goes on undisturbed."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from raw_client import RawClient, number, text

pytestmark = pytest.mark.triton

PROMPT = {"text_input": text("One two three")}
IDS = np.array([[1, 2, 3]], np.int32)


def sampling(**values: Any) -> dict[str, Any]:
    return PROMPT | {"sampling_parameters": text(json.dumps(values))}


# What is sent, the words that the refusal must contain.
BAD: dict[str, tuple[dict[str, Any], list[str]]] = {
    "empty prompt": ({"text_input": text("")}, ["text_input", "''", "at least one character"]),
    "no prompt": ({"max_tokens": number(1, np.int32)}, ["text_input", "none of them", "one of"]),
    "both prompts": (PROMPT | {"input_ids": IDS}, ["text_input", "text_input and input_ids", "one of"]),
    "prompt beyond the context": ({"text_input": text("word " * 9000)}, ["text_input", "900", "context 8192"]),
    "invalid UTF-8": ({"text_input": text(b"abc\xff\xfe")}, ["text_input", "invalid UTF-8 at byte 3"]),
    "ids beyond the vocabulary": ({"input_ids": np.array([[1, 49152]], np.int32)}, ["input_ids", "49152", "0..49151"]),
    "negative ids": ({"input_ids": np.array([[1, -3]], np.int32)}, ["input_ids", "-3", "0..49151"]),
    "max_tokens 0": (PROMPT | {"max_tokens": number(0, np.int32)}, ["max_tokens", "given 0", "at least 1"]),
    "max_tokens negative": (PROMPT | {"max_tokens": number(-5, np.int32)}, ["max_tokens", "given -5"]),
    "max_tokens beyond the context": (PROMPT | {"max_tokens": number(9000, np.int32)}, ["max_tokens", "9000", "8192"]),
    "temperature negative": (PROMPT | {"temperature": number(-1, np.float32)}, ["temperature", "-1", "[0, 100]"]),
    "temperature NaN": (PROMPT | {"temperature": number(np.nan, np.float32)}, ["temperature", "nan"]),
    "top_p 0": (PROMPT | {"top_p": number(0, np.float32)}, ["top_p", "(0, 1]"]),
    "top_p 1.5": (PROMPT | {"top_p": number(1.5, np.float32)}, ["top_p", "1.5", "(0, 1]"]),
    "unknown sampling key": (sampling(temperatur=1.0), ["temperatur", "unknown key", "temperature"]),
    "malformed JSON": (PROMPT | {"sampling_parameters": text("{'a'")}, ["sampling_parameters", "malformed JSON"]),
    "JSON of another kind": (PROMPT | {"sampling_parameters": text("[1]")}, ["sampling_parameters", "a JSON object"]),
    "two values": (sampling(max_tokens=3) | {"max_tokens": number(4, np.int32)}, ["max_tokens", "4 and 3"]),
    "10,000 stop words": (PROMPT | {"stop_words": text(*(["x"] * 10_000))}, ["stop_words", "10000", "at most 64"]),
    "a long stop word": (PROMPT | {"stop_words": text("y" * 2000)}, ["stop_words", "1024"]),
    "beam search": (PROMPT | {"beam_width": number(4, np.int32)}, ["beam_width", "given 4"]),
    "context logits": (PROMPT | {"return_context_logits": number(True, np.bool_)}, ["return_context_logits", "false"]),
    "wrong dtype": (PROMPT | {"max_tokens": number(5, np.int64)}, ["max_tokens", "INT64", "INT32"]),
    "wrong shape": (PROMPT | {"max_tokens": np.array([[1, 2]], np.int32)}, ["max_tokens", "[1,2]"]),
    "two prompts in one": ({"text_input": np.array([[b"a"], [b"b"]], np.object_)}, ["batch"]),
    "unknown tensor": (PROMPT | {"lora_task_id": number(1, np.uint64)}, ["lora_task_id"]),
    "unknown class": (PROMPT | {"priority": text("urgent")}, ["priority", "urgent", "interactive, normal, batch"]),
    "deadline 0": (PROMPT | {"deadline_ms": number(0, np.int64)}, ["deadline_ms", "given 0"]),
    "stop without an id": ({"stop": number(True, np.bool_)}, ["stop", "without an id"]),
}
BAD_PARAMETERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown parameter": ({"best_off": 2}, ["best_off", "unknown parameter"]),
    "malformed messages": ({"messages": "[{"}, ["messages", "malformed JSON"]),
    "empty messages": ({"messages": "[]"}, ["messages", "non-empty"]),
}


@pytest.mark.parametrize("model", ["ensemble", "scheduler"])
def test_bad_requests_are_named_and_disturb_nobody(client: RawClient, model: str) -> None:
    counting = {
        "text_input": text("1, 2, 3, 4, 5, 6, 7, 8, 9, 10,"),
        "max_tokens": number(100, np.int32),
        "sampling_parameters": text('{"ignore_eos": true}'),
        "stream": number(True, np.bool_),
    }
    whole = client.answer(model, counting)
    bystander = client.stream(model, counting)
    responses = iter(bystander)
    seen = next(responses).as_numpy("text_output")[0].decode()
    wrong = []
    for name, (arrays, words) in BAD.items():
        message = client.error(model, arrays)
        wrong += [f"{name}: {word!r} is not in {message!r}" for word in words if word not in message]
    for name, (parameters, words) in BAD_PARAMETERS.items():
        message = client.error(model, {"text_input": text("")}, parameters=parameters)
        wrong += [f"{name}: {word!r} is not in {message!r}" for word in words if word not in message]
    assert not wrong, "\n".join(wrong)
    seen += "".join(result.as_numpy("text_output")[0].decode() for result in responses)
    bystander.close()
    assert seen == whole
