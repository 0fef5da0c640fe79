"""What a body means: pure translation, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tritandem.front.ask import MAX_DEPTH, Ask, parse_body, read_ask
from tritandem.front.errors import ApiError
from tritandem.front.fields import CHAT, COMPLETIONS, FIELDS, NEUTRAL, WITHOUT_EFFECT

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def chat(**fields: Any) -> Ask:
    return read_ask(CHAT, {"messages": HELLO, **fields})


def completion(**fields: Any) -> Ask:
    return read_ask(COMPLETIONS, {"prompt": "hello", **fields})


def refusal(read: Any, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(**fields)
    return caught.value


def test_openais_defaults_hold() -> None:
    assert chat().options == {"temperature": 1.0}
    assert completion().options == {"temperature": 1.0, "max_tokens": 16}
    assert (chat().n, chat().stream, chat().logprobs) == (1, False, None)


def test_where_the_models_authors_have_a_temperature_none_is_sent() -> None:
    assert read_ask(CHAT, {"messages": HELLO}, None).options == {}
    assert read_ask(CHAT, {"messages": HELLO, "temperature": 0.3}, None).options == {"temperature": 0.3}


def test_what_the_engine_honours_is_handed_on() -> None:
    asked = {"temperature": 0, "top_p": 0.5, "top_k": 4, "min_p": 0.1, "seed": 7, "min_tokens": 2, "max_tokens": 9}
    asked |= {"presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "bad_words": ["x"]}
    asked |= {"logit_bias": {"42": -100}, "allowed_token_ids": [42, 7]}
    inside = {"ignore_eos": True, "stop_token_ids": [3]}
    expected = {**asked, "stop_words": ["END"], "sampling_parameters": inside}
    assert chat(**asked, **inside, stop="END").options == expected
    assert completion(**asked, **inside, stop=["END", ""]).options == expected


def test_tools_that_may_not_be_called_are_not_shown() -> None:
    assert (chat(tools=[TOOL]).tools, chat(tools=[TOOL]).options["tools"]) == (("add",), [TOOL])
    assert chat(tools=[TOOL], tool_choice="none") == chat(tools=[]) == chat()
    assert not chat(tools=[TOOL], parallel_tool_calls=False).parallel_calls


def test_null_says_nothing() -> None:
    assert chat(**{field.name: None for field in FIELDS if field.name not in ("messages", "prompt")}) == chat()


@pytest.mark.parametrize("field", NEUTRAL, ids=lambda field: field.name)
def test_a_field_that_would_change_the_answer_is_refused_by_name(field: Any) -> None:
    ask = completion if field.name.startswith("tool") else chat
    for value in field.values:
        assert ask(**{field.name: value}) == ask()
    error = refusal(ask, **{field.name: {"some": "thing"}})
    assert (error.status, error.param, error.code) == (400, field.name, "unsupported_value")


def test_an_unknown_field_is_told_and_fails_nothing() -> None:
    assert chat(session_id="1", **dict.fromkeys(WITHOUT_EFFECT, True)).unknown == ("session_id",)
    assert completion(messages=HELLO).unknown == ("messages",)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [1]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"stop": [1]}, "stop"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"42": "x"}}, "logit_bias[42]"),
        ({"allowed_token_ids": ["x"]}, "allowed_token_ids"),
        ({"stop_token_ids": ["1"]}, "stop_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stream": 1}, "stream"),
        ({"stream_options": True}, "stream_options"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": {}}, "tools"),
        ({"tools": [TOOL] * 257}, "tools"),
        ({"tools": [TOOL, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "add"}}}, "tool_choice"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"user": 1}, "user"),
        ({"model": 1}, "model"),
    ],
    ids=str,
)
def test_a_wrong_value_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(chat, **fields)
    assert (error.status, error.param) == (400, param)
    assert f"{param}: given " in str(error)


def test_what_must_be_given_is_named() -> None:
    for door, param in ((CHAT, "messages"), (COMPLETIONS, "prompt")):
        with pytest.raises(ApiError) as caught:
            read_ask(door, {})
        assert (caught.value.param, caught.value.code) == (param, "missing_required_parameter")


@pytest.mark.parametrize(
    ("prompt", "questions"),
    [
        ("a", [{"prompt": "a"}]),
        (["a", "b"], [{"prompt": "a"}, {"prompt": "b"}]),
        ([1, 2], [{"input_ids": [1, 2]}]),
        ([[1, 2], [3]], [{"input_ids": [1, 2]}, {"input_ids": [3]}]),
    ],
)
def test_prompts_are_texts_or_ids_one_or_several(prompt: Any, questions: list[Any]) -> None:
    assert list(completion(prompt=prompt).questions) == questions


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 1], [[1], "a"], 1, {"a": 1}, [True]], ids=str)
def test_anything_else_is_no_prompt(prompt: Any) -> None:
    assert refusal(completion, prompt=prompt).param == "prompt"


def test_choices_are_bounded_over_all_prompts() -> None:
    assert completion(prompt=["a"] * 64, n=2).n == 2
    assert refusal(completion, prompt=["a"] * 65, n=2).param == "n"


def test_the_model_makes_the_answers_and_more_where_the_best_are_wanted() -> None:
    assert "n" not in completion().options
    assert completion(n=2).options["n"] == chat(n=2).options["n"] == 2
    ask = completion(n=2, best_of=5)
    assert (ask.n, ask.options["n"], ask.options["logprobs"], ask.logprobs) == (2, 5, 0, None)
    assert (ask.names["n"], completion(n=2).names.get("n")) == ("best_of", None)
    assert completion(n=2, best_of=2, stream=True).options["n"] == 2
    assert refusal(completion, n=3, best_of=2).param == "best_of"
    assert refusal(completion, best_of=2, stream=True).param == "best_of"
    assert refusal(completion, prompt=["a"] * 20, best_of=7).param == "best_of"


def test_the_newer_name_of_the_budget_is_the_one_that_errors_use() -> None:
    ask = chat(max_completion_tokens=5)
    assert (ask.options["max_tokens"], ask.names["max_tokens"]) == (5, "max_completion_tokens")


def test_log_probabilities_have_two_forms() -> None:
    assert chat(logprobs=True).options["logprobs"] == 0
    assert chat(logprobs=True, top_logprobs=3).options["logprobs"] == 3
    assert chat(logprobs=False, top_logprobs=0).logprobs is None
    assert completion(logprobs=2).options["logprobs"] == 2


def test_an_echo_with_log_probabilities_asks_for_the_prompts() -> None:
    assert "prompt_logprobs" not in completion(echo=True).options
    assert completion(echo=True, logprobs=2).options["prompt_logprobs"] == 2
    assert completion(echo=True, logprobs=2, prompt_logprobs=4).options["prompt_logprobs"] == 4
    assert "prompt_logprobs" not in completion(logprobs=2).options
    assert chat(prompt_logprobs=0).options["prompt_logprobs"] == 0
    assert refusal(chat, prompt_logprobs=0, stream=True).param == "prompt_logprobs"


def test_no_answer_is_wanted_only_where_the_prompt_is() -> None:
    """The model says one token then, which nobody is shown."""
    ask = completion(echo=True, logprobs=1, max_tokens=0)
    assert (ask.answered, ask.options["max_tokens"]) == (False, 1)
    assert completion(max_tokens=0).options["max_tokens"] == 0, "refused by the engine, which names it"
    assert completion(echo=True).answered


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b'{"prompt": "', "body"),
        (b"[]", "body"),
        (b'"text"', "body"),
        (b'{"prompt": "\xff"}', "body"),
        (b'{"prompt": "\\ud800"}', "prompt"),
        (b'{"messages": [{"role": "user", "content": "\\uDC00"}]}', "messages"),
        (b'{"n": ' + b"9" * 500 + b"}", "body"),
        (b'{"tools": ' + b"[" * 100_000, "body"),
        (b'{"tools": ' + b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1) + b"}", "tools"),
        (b'{"tools": [' + b"[]," * 500_000 + b"[]]}", "body"),
    ],
    ids=lambda value: str(value[:24]),
)
def test_a_body_that_is_no_sound_json_object_is_refused_by_name(body: bytes, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_body(body)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert len(caught.value.body()) < 1000


def test_depth_that_a_request_needs_is_taken() -> None:
    value: Any = 1
    for _ in range(MAX_DEPTH):
        value = [value]
    assert parse_body(json.dumps({"x": value, "y": "😀"}).encode()) == {"x": value, "y": "😀"}
