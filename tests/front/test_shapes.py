"""Answers in OpenAI's two shapes, and errors in its words."""

from __future__ import annotations

import json

import pytest
from tritandem.front.chat import ChatShape
from tritandem.front.completions import CompletionShape, scores_of_prompt, with_prompt
from tritandem.front.errors import from_client
from tritandem.front.shapes import Envelope, finish_reason, usage
from tritandem_client import (
    Cancelled,
    ConnectionFailed,
    DeadlineExpired,
    Failed,
    InvalidRequest,
    Result,
    Saturated,
    ServerNotReady,
    Stopped,
    Timeout,
    TokenLogprob,
    TritandemClientError,
)

UNLIKELY = TokenLogprob(7, -3.0, "é", ((1, -0.1), (2, -2.0), (7, -3.0)), ("a", "\ufffd", "é"))
LIKELY = TokenLogprob(1, -0.1, "a", ((1, -0.1), (2, -2.0)), ("a", "b"))


def result(prompt: int, answer: int, cached: int) -> Result:
    return Result("", "stop", "COMPLETED", "id", prompt, answer, cached)


def test_a_chat_tells_bytes_and_the_likeliest_tokens() -> None:
    [first, second] = ChatShape().piece(0, "éa", [UNLIKELY, LIKELY], 2, 0)["logprobs"]["content"]
    assert (first["token"], first["logprob"], first["bytes"]) == ("é", -3.0, [195, 169])
    assert [one["token"] for one in first["top_logprobs"]] == ["a", "\ufffd"]
    assert first["top_logprobs"][1]["bytes"] is None, "a part of a character"
    assert [one["logprob"] for one in second["top_logprobs"]] == [-0.1, -2.0]
    assert ChatShape().piece(0, "a", [LIKELY], 0, 0)["logprobs"]["content"][0]["top_logprobs"] == []


def test_a_completion_tells_offsets_and_alternatives_by_text() -> None:
    said = CompletionShape().piece(0, "éa", [UNLIKELY, LIKELY], 2, 10)["logprobs"]
    assert said == {
        "tokens": ["é", "a"],
        "token_logprobs": [-3.0, -0.1],
        "top_logprobs": [{"a": -0.1, "\ufffd": -2.0}, {"a": -0.1, "b": -2.0}],
        "text_offset": [10, 11],
    }


def test_a_prompts_tokens_stand_before_the_answers() -> None:
    parts = [TokenLogprob(9, -1.0, "\ufffd", ((9, -1.0),), ("\ufffd",))] * 2
    prompt = [TokenLogprob(0, None, "<s>"), *parts, LIKELY]
    answer = CompletionShape().piece(0, "a", [LIKELY], 1, 2)["logprobs"]
    said = with_prompt(answer, prompt, "é" + "a", 1)
    assert said["tokens"] == ["<s>", "\ufffd", "\ufffd", "a", "a"]
    assert said["token_logprobs"] == [None, -1.0, -1.0, -0.1, -0.1]
    assert said["top_logprobs"] == [None, {"\ufffd": -1.0}, {"\ufffd": -1.0}, {"a": -0.1}, {"a": -0.1}]
    assert said["text_offset"] == [0, 0, 0, 1, 2], "what the text does not show begins where the next token does"
    assert with_prompt(None, prompt, "éa", 0)["top_logprobs"] is None
    assert scores_of_prompt(prompt)[0] is None
    assert scores_of_prompt([UNLIKELY]) == [
        {
            "1": {"logprob": -0.1, "rank": 1, "decoded_token": "a"},
            "2": {"logprob": -2.0, "rank": 2, "decoded_token": "\ufffd"},
            "7": {"logprob": -3.0, "rank": 3, "decoded_token": "é"},
        }
    ]


def test_of_alternatives_that_read_alike_the_likeliest_is_told() -> None:
    alike = TokenLogprob(1, -0.1, "\ufffd", ((1, -0.1), (2, -2.0)), ("\ufffd", "\ufffd"))
    assert CompletionShape().piece(0, "", [alike], 2, 0)["logprobs"]["top_logprobs"] == [{"\ufffd": -0.1}]


def test_a_prompt_that_is_answered_twice_counts_once() -> None:
    counted = usage([result(10, 7, 0), result(5, 2, 4)])
    assert counted == {
        "prompt_tokens": 15,
        "completion_tokens": 9,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 4},
    }


def test_events_and_documents_say_who_they_are() -> None:
    envelope = Envelope(ChatShape(), "chatcmpl-1", 'a "model"', 5)
    event = envelope.usage_event({"total_tokens": 1}).decode()
    assert event.startswith("data: {")
    assert event.endswith("}\n\n")
    assert json.loads(event[6:]) == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 5,
        "model": 'a "model"',
        "choices": [],
        "usage": {"total_tokens": 1},
    }
    assert json.loads(envelope.document([], {}))["object"] == "chat.completion"


def test_reasons_are_openais() -> None:
    assert [finish_reason(said) for said in ("stop", "length", "cancelled")] == ["stop", "length", "stop"]


@pytest.mark.parametrize(
    ("error", "status", "code", "outcome"),
    [
        (InvalidRequest("top_p", 7, "(0, 1]"), 400, "invalid_value", "REJECTED_INVALID"),
        (InvalidRequest("text_input", message="text_input: given 9 tokens, allowed: at most 7 tokens (context 8)"),
         400, "context_length_exceeded", "REJECTED_INVALID"),
        (Saturated("the queue is full; retry after 2.5 s", 2.5), 429, "rate_limit_exceeded", "REJECTED_SATURATED"),
        (Saturated("the server is draining; retry after 5.0 s", 5), 503, "draining", "REJECTED_SATURATED"),
        (DeadlineExpired("too late"), 504, "expired", "EXPIRED"),
        (Timeout("too late"), 504, "failed", "FAILED"),
        (Cancelled("x"), 499, "cancelled", "CANCELLED"),
        (Stopped("x"), 499, "stopped", "STOPPED"),
        (Failed("x"), 500, "failed", "FAILED"),
        (ConnectionFailed("x"), 503, "unavailable", "FAILED"),
        (ServerNotReady("x"), 503, "unavailable", "FAILED"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)  # fmt: skip
def test_each_outcome_has_one_status(error: TritandemClientError, status: int, code: str, outcome: str) -> None:
    said = from_client(error, {})
    assert (said.status, said.code, said.outcome.value) == (status, code, outcome)
    assert ("retry-after" in said.headers) == (status in (429, 503))


def test_fields_are_named_as_the_client_knows_them() -> None:
    error = InvalidRequest("max_tokens", message="max_tokens: given 0, allowed: 1..9")
    said = from_client(error, {"max_tokens": "max_completion_tokens"})
    assert (said.param, str(said)) == ("max_completion_tokens", "max_completion_tokens: given 0, allowed: 1..9")
    assert from_client(InvalidRequest("text_input", "", "a text"), {}).param == "prompt"
    assert from_client(Saturated("full", 2.5), {}).headers == {"retry-after": "3"}
