"""The OpenAI API beside the real server, by the package `openai`."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from tritandem.server import TritonServer
from tritandem.server.front_workers import FrontOptions, FrontWorkers

from tests.real_triton.raw_client import RawClient
from tests.real_triton.started import demo_model, free_ports

openai = pytest.importorskip("openai", reason="openai is not installed")
pytestmark = [
    pytest.mark.triton,
    # Of the package's own classes, at their import.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: Any = {"model": "tiny", "temperature": 0}
LONG: Any = {**GREEDY, "max_tokens": 4000, "extra_body": {"ignore_eos": True}}
FREED_WITHIN_S = 0.5  # of 50 ms on an idle machine; two busy cores take their time


@pytest.fixture(scope="module")
def base_url(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with worker(server, tmp_path_factory.mktemp("front") / "log", "think") as url:
        yield url


@contextmanager
def worker(server: TritonServer, log: Path, reasoning: str) -> Iterator[str]:
    [port] = free_ports(1)
    options = dataclasses.replace(server.options, openai_port=port)
    front = FrontWorkers(FrontOptions(("tiny",), workers=1, tool_parser="hermes", reasoning_parser=reasoning), print)
    front.start(options, log, server.cpus)
    yield f"http://{options.url(port)}/v1"
    front.kill()
    assert '"status": 500' not in log.read_text()


@pytest.fixture
def api(base_url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=base_url, api_key="none", timeout=60, max_retries=0) as client:
        yield client


def test_a_chat_knows_the_answer(api: Any) -> None:
    answer = api.chat.completions.create(messages=QUESTION, max_completion_tokens=16, **GREEDY)
    [choice] = answer.choices
    assert "Paris" in choice.message.content
    assert (choice.message.role, choice.finish_reason) == ("assistant", "stop")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    again = api.chat.completions.create(messages=QUESTION, max_tokens=3, **GREEDY)
    assert (again.choices[0].finish_reason, again.usage.completion_tokens) == ("length", 3)
    assert again.usage.prompt_tokens_details.cached_tokens >= 16


def test_a_stream_is_the_same_answer_in_pieces(api: Any) -> None:
    asked = {"messages": QUESTION, "max_tokens": 16, **GREEDY}
    chunks = list(api.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked))
    whole = api.chat.completions.create(**asked)
    assert chunks[0].choices[0].delta.role == "assistant"
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert said == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop"]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_control_tokens_are_shown_to_those_who_ask_for_them(api: Any) -> None:
    asked = {"messages": QUESTION, "max_tokens": 16, **GREEDY}
    hidden, shown = (
        api.chat.completions.create(extra_body={"ignore_eos": True, "skip_special_tokens": skip}, **asked)
        for skip in (True, False)
    )
    said = shown.choices[0].message.content
    assert "<|im_end|>" in said
    assert "<|im_end|>" not in hidden.choices[0].message.content
    assert re.sub(r"<\|\w+\|>", "", said) == hidden.choices[0].message.content


def test_the_models_are_listed(api: Any) -> None:
    assert [model.id for model in api.models.list()] == ["tiny"]
    assert api.models.retrieve("tiny").id == "tiny"


def test_several_choices_differ_and_a_seed_repeats_them(api: Any) -> None:
    asked = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 8, "n": 3, "seed": 7}
    first, second = ([c.text for c in api.completions.create(**asked).choices] for _ in range(2))
    assert first == second
    assert len(set(first)) > 1
    streamed = ["", "", ""]
    for chunk in api.completions.create(stream=True, **asked):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == first
    alone = [api.completions.create(**{**asked, "n": 1, "seed": 7 + i}).choices[0].text for i in range(3)]
    assert alone == first, "each draws as if it were asked for by itself, with the seed after the one before"


def test_several_answers_to_a_prompt_are_those_of_as_many_requests(api: Any) -> None:
    asked = {"prompt": "The sea is", "max_tokens": 6, **GREEDY}
    alone = api.completions.create(**asked)
    several = api.completions.create(n=4, logprobs=1, stop=["never"], **asked)
    assert [choice.text for choice in several.choices] == [alone.choices[0].text] * 4
    assert all(choice.logprobs.tokens == several.choices[0].logprobs.tokens for choice in several.choices)
    assert several.usage.prompt_tokens == alone.usage.prompt_tokens
    assert several.usage.completion_tokens == 4 * alone.usage.completion_tokens
    best = api.completions.create(prompt="The sea is", max_tokens=6, model="tiny", seed=3, extra_body={"best_of": 4})
    assert len(best.choices) == 1
    with pytest.raises(openai.BadRequestError, match="n: given 100"):
        api.completions.create(n=100, **asked)


def test_prompts_are_texts_or_ids_and_texts_are_echoed(api: Any) -> None:
    answer = api.completions.create(prompt=["1, 2, 3,", "a, b, c,"], max_tokens=4, echo=True, **GREEDY)
    assert [choice.text[:8] for choice in answer.choices] == ["1, 2, 3,", "a, b, c,"]
    ids = api.completions.create(prompt=[[1, 2, 3], [4, 5]], max_tokens=2, echo=True, **GREEDY)
    assert [choice.index for choice in ids.choices] == [0, 1]
    assert ids.usage.prompt_tokens == 5


def test_a_prompts_log_probabilities_are_the_models_own(api: Any) -> None:
    """As lm-eval asks for them."""
    text, model_folder = "The capital of France is Paris, the café of Europe.", demo_model()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    ids = tokenizer(text).input_ids
    asked = {"prompt": ids, "echo": True, "logprobs": 2, "max_tokens": 1, **GREEDY}
    answer = api.completions.create(**asked)
    said = answer.choices[0].logprobs
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    truth = logprobs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    assert said.token_logprobs[0] is None
    assert said.token_logprobs[1:-1] == pytest.approx(truth, abs=2e-3)
    best = [max(top.values()) for top in said.top_logprobs[1:]]
    assert best == pytest.approx(logprobs.max(dim=-1).values.tolist(), abs=2e-3)
    assert answer.choices[0].text.startswith(text)
    assert all(text[at:].startswith(token) for token, at in zip(said.tokens[:5], said.text_offset, strict=False))
    alone = api.completions.create(**{**asked, "max_tokens": 0})
    assert (alone.choices[0].text, alone.usage.completion_tokens) == (text, 0)
    assert alone.choices[0].logprobs.token_logprobs == said.token_logprobs[:-1]
    streamed = [chunk.choices[0] for chunk in api.completions.create(stream=True, **asked)]
    assert streamed[0].text == text
    assert streamed[0].logprobs.token_logprobs == said.token_logprobs[:-1]


def test_log_probabilities_come_in_both_shapes(api: Any) -> None:
    chat = api.chat.completions.create(messages=QUESTION, max_tokens=4, logprobs=True, top_logprobs=3, **GREEDY)
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    for token in content:
        assert token.token == token.top_logprobs[0].token, "greedy takes the likeliest"
        assert len(token.top_logprobs) == 3
        assert bytes(token.bytes).decode() == token.token
    plain = api.completions.create(prompt="1, 2, 3,", max_tokens=4, logprobs=2, **GREEDY)
    said = plain.choices[0].logprobs
    assert "".join(said.tokens) == plain.choices[0].text
    assert [max(top, key=top.get) for top in said.top_logprobs] == said.tokens
    assert {len(top) for top in said.top_logprobs} == {2}
    assert said.text_offset[0] == 0


def test_every_field_is_understood(api: Any) -> None:
    ours = {"top_k": 40, "min_p": 0.01, "min_tokens": 2, "repetition_penalty": 1.1, "bad_words": [" Paris", "Paris"]}
    ours |= {"ignore_eos": True, "stop_token_ids": [5], "logit_bias": {"7": -100}}
    asked = {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.1, "frequency_penalty": 0.1, "seed": 3}
    answer = api.chat.completions.with_raw_response.create(
        model="tiny", messages=QUESTION, max_completion_tokens=6, stop=["END"], user="ann", metadata={"a": "b"},
        extra_body={**ours, "chat_id": "of a user interface"}, **asked,
        extra_headers={"x-priority": "batch", "x-deadline-ms": "60000", "x-request-id": "mine"},
    )  # fmt: skip
    assert answer.headers["x-ignored-fields"] == "chat_id"
    assert answer.headers["x-request-id"] == "mine"
    assert "Paris" not in answer.parse().choices[0].message.content


def test_bias_and_allowed_ids_choose_the_tokens(api: Any, client: RawClient) -> None:
    asked: Any = {"prompt": "The capital of France is", "max_tokens": 3, **GREEDY}
    token = 260
    forced = api.completions.create(**asked, logit_bias={str(token): 100})
    [word] = set(api.completions.create(**asked, logprobs=0, logit_bias={str(token): 100}).choices[0].logprobs.tokens)
    assert forced.choices[0].text == word * 3
    allowed = api.completions.create(**asked, extra_body={"allowed_token_ids": [token]})
    assert (allowed.choices[0].text, allowed.choices[0].finish_reason) == (word * 3, "length")
    chat = api.chat.completions.create(messages=QUESTION, max_tokens=3, logit_bias={str(token): 100}, **GREEDY)
    assert chat.choices[0].message.content.strip() == (word * 3).strip()


def test_a_prompt_with_several_answers_is_prefilled_once(api: Any, client: RawClient) -> None:
    prompt = "A story that nobody has told before: " + ", ".join(f"{i} {i * i}" for i in range(30))
    before = client.engine_load().prefix_hit_tokens
    usage = api.completions.create(model="tiny", prompt=prompt, max_tokens=4, n=3).usage
    assert usage.prompt_tokens_details.cached_tokens == 0
    hits = client.engine_load().prefix_hit_tokens - before
    assert hits >= 2 * (usage.prompt_tokens - 32), "the second and the third found it"


def test_an_answer_ends_where_it_is_told_to(api: Any) -> None:
    answer = api.completions.create(prompt="1, 2, 3, 4,", max_tokens=32, stop=[" 7"], **GREEDY)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" 5, 6,", "stop")


def test_errors_are_the_packages_own(api: Any) -> None:
    for fields, param in (
        ({"top_p": 7}, "top_p"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"7": 101}}, "logit_bias[7]"),
        ({"extra_body": {"allowed_token_ids": [-1]}}, "allowed_token_ids"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(**{"messages": QUESTION, **GREEDY, **fields})
        assert caught.value.param.startswith(param)
    with pytest.raises(openai.NotFoundError):
        api.chat.completions.create(messages=QUESTION, model="gpt-5")
    with pytest.raises(openai.APIStatusError) as late:
        api.completions.create(prompt="x", extra_headers={"x-deadline-ms": "200"}, **LONG)
    assert (late.value.status_code, late.value.code) == (504, "expired")


def test_a_client_that_leaves_frees_its_row(api: Any, client: RawClient) -> None:
    def at_work() -> int:
        load = client.engine_load()
        return load.running + load.waiting

    end_s = time.monotonic() + 30
    while at_work():
        assert time.monotonic() < end_s, "others are at work"
        Event().wait(0.05)
    stream = api.completions.create(prompt="Once upon a time", stream=True, **LONG)
    next(iter(stream))
    assert at_work() == 1
    stream.close()
    left_s = time.monotonic()
    while at_work():
        assert time.monotonic() - left_s < FREED_WITHIN_S
        Event().wait(0.005)
    print(f"freed after {(time.monotonic() - left_s) * 1e3:.0f} ms")


TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def test_a_chat_with_tools_and_their_results_is_answered(api: Any) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    history = [*QUESTION, {"role": "assistant", "content": "", "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": "abcdefghi", "content": "2"}, *QUESTION]
    asked = {"messages": history, "tools": [TOOL], "max_tokens": 8, **GREEDY}
    whole = api.chat.completions.create(**asked).choices[0]
    assert (whole.message.role, whole.finish_reason) in [("assistant", "stop"), ("assistant", "length")]
    chunks = list(api.chat.completions.create(stream=True, **asked))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == (whole.message.content or "")


POINT: Any = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "of": {"enum": ["a", "b"]}},
    "required": ["x", "of"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def thoughtless(server: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model that may think before its structure can do so until its tokens are spent, if nothing taught it to end."""
    with (
        worker(server, tmp_path_factory.mktemp("thoughtless") / "log", "none") as url,
        openai.OpenAI(base_url=url, api_key="none", timeout=60, max_retries=0) as client,
    ):
        yield client


def test_an_answer_keeps_to_its_schema_and_a_cut_one_says_so(thoughtless: Any) -> None:
    api = thoughtless
    kept: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
    asked: Any = {"model": "tiny", "messages": QUESTION, "response_format": kept}
    for choice in api.chat.completions.create(**asked, temperature=1, n=4, seed=1, max_tokens=100).choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), POINT)
    assert api.chat.completions.create(**asked, max_tokens=2).choices[0].finish_reason == "length"
    said = api.responses.create(
        model="tiny", input=QUESTION, text={"format": {**kept["json_schema"], "type": "json_schema"}}
    )
    jsonschema.validate(json.loads(said.output_text), POINT)
    refused: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {"type": "string"}}}}
    with pytest.raises(openai.BadRequestError, match="not") as caught:
        api.chat.completions.create(**{**asked, "response_format": refused})
    assert caught.value.param == "response_format.json_schema.schema"


def test_a_schema_holds_behind_the_thoughts(api: Any) -> None:
    """The model is shown how to think, and does so; its answer would not keep to the schema by itself."""
    asked: Any = {"model": "tiny", "temperature": 0, "max_tokens": 80}
    shown = (("Where is it?", "four, of a", '{"x": 4, "of": "a"}'), ("And now?", "ten, of c", '{"x": 10, "of": "c"}'))
    messages: list[Any] = []
    for question, thought, answer in shown:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": f"<think>It is at {thought}.</think>\n{answer}"})
    messages.append({"role": "user", "content": "And now?"})
    kept: Any = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
    [choice] = api.chat.completions.create(messages=messages, response_format=kept, **asked).choices
    assert choice.finish_reason == "stop"
    jsonschema.validate(json.loads(choice.message.content), POINT)
    assert choice.message.reasoning_content.startswith("It is at ")
    chunks = [
        chunk.choices[0].delta
        for chunk in api.chat.completions.create(messages=messages, response_format=kept, stream=True, **asked)
    ]
    assert "".join(delta.content or "" for delta in chunks) == choice.message.content
    thoughts = [getattr(delta, "reasoning_content", None) or "" for delta in chunks]
    assert "".join(thoughts) == choice.message.reasoning_content


def test_a_call_that_must_be_is_one_and_its_arguments_are_valid(thoughtless: Any) -> None:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": POINT, "strict": True}} for name in ("f", "g")
    ]
    asked: Any = {"model": "tiny", "messages": QUESTION, "tools": tools, "max_tokens": 200, "temperature": 1, "seed": 3}
    for choice in ("required", {"type": "function", "function": {"name": "g"}}):
        whole = thoughtless.chat.completions.create(**asked, tool_choice=choice, parallel_tool_calls=False).choices[0]
        [call] = whole.message.tool_calls
        assert whole.finish_reason == "tool_calls"
        assert call.function.name in (("f", "g") if choice == "required" else ("g",))
        jsonschema.validate(json.loads(call.function.arguments), POINT)


def test_responses_are_the_same_whole_and_streamed(api: Any) -> None:
    asked = {"model": "tiny", "input": QUESTION, "temperature": 0, "max_output_tokens": 16, "store": False}
    whole = api.responses.create(**asked)
    assert "Paris" in whole.output_text
    assert whole.status == "completed"
    events = list(api.responses.create(stream=True, **asked))
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole.output_text == events[-1].response.output_text
    assert whole.usage.output_tokens == events[-1].response.usage.output_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        api.responses.create(model="tiny", input="x", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"


def test_messages_are_answered_as_anthropic_does(base_url: str) -> None:
    asked = {"model": "tiny", "max_tokens": 16, "temperature": 0, "messages": QUESTION}
    with openai.OpenAI(base_url=base_url, api_key="none", timeout=60, max_retries=0) as client:
        whole = client.post("/messages", body=asked, cast_to=object)
        refused = client.with_options(max_retries=0)
        with pytest.raises(openai.BadRequestError) as caught:
            refused.post("/messages", body={**asked, "max_tokens": None}, cast_to=object)
    assert "Paris" in whole["content"][0]["text"]
    assert whole["stop_reason"] == "end_turn"
    assert caught.value.response.json()["error"]["type"] == "invalid_request_error"


def test_texts_and_ids_are_each_others(base_url: str) -> None:
    with openai.OpenAI(base_url=base_url.removesuffix("/v1"), api_key="none", timeout=60, max_retries=0) as client:
        said: Any = client.post("/tokenize", body={"prompt": "Der Fluß <|im_end|> 🌊"}, cast_to=object)
        assert said["count"] == len(said["tokens"]) > 4
        assert said["max_model_len"] == 8192
        back: Any = client.post("/detokenize", body={"tokens": said["tokens"]}, cast_to=object)
        assert back == {"prompt": "Der Fluß <|im_end|> 🌊"}
        chat: Any = client.post("/tokenize", body={"messages": QUESTION}, cast_to=object)
        asked: Any = client.post("/v1/chat/completions", body={"messages": QUESTION, "max_tokens": 1}, cast_to=object)
        assert chat["count"] == asked["usage"]["prompt_tokens"]
        wrong: Any = [
            ("/detokenize", {"tokens": [10**6]}, "tokens"),
            ("/tokenize", {"messages": [{"role": "user", "content": 7}]}, "messages"),
        ]
        for path, body, param in wrong:
            with pytest.raises(openai.BadRequestError) as caught:
                client.post(path, body=body, cast_to=object)
            assert str(caught.value.param).startswith(param)


def test_each_choice_tells_the_stop_word_that_ended_it(api: Any) -> None:
    asked: Any = {**GREEDY, "prompt": "1, 2, 3,", "max_tokens": 12, "n": 2}
    whole = api.completions.create(stop=["6", "x"], **asked)
    assert [(one.finish_reason, one.model_extra.get("stop_reason")) for one in whole.choices] == [("stop", "6")] * 2
    ends = [one for event in api.completions.create(stop=["6"], stream=True, **asked) for one in event.choices]
    assert [one.model_extra["stop_reason"] for one in ends if one.finish_reason] == ["6", "6"]
    long = api.completions.create(stop=["x"], **asked)
    assert [(one.finish_reason, one.model_extra.get("stop_reason")) for one in long.choices] == [("length", None)] * 2
