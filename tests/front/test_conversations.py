"""/v1/responses and /v1/messages through the application, with a scripted model behind it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from tritandem.front.ask import read_ask
from tritandem.front.errors import ApiError
from tritandem.front.fields import CHAT
from tritandem.front.formats.choose import Formats
from tritandem.front.keys import read_keys
from tritandem.front.messages import Messages
from tritandem.front.responses import Responses

from tests.client.scripts import chunk, last, saying, streaming
from tests.fakes.triton_protocol import Received
from tests.front.test_app import HELLO, House, house
from tests.front.test_turns import CALLING, FORMATS, TOOLS

__all__ = ["house"]
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
CUSTOM = [{"name": tool["function"]["name"], "input_schema": {"type": "object"}} for tool in TOOLS]
ASK: dict[str, dict[str, Any]] = {
    RESPONSES: {"input": "hello"},
    MESSAGES: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8},
}
WITH_TOOLS = {RESPONSES: {**ASK[RESPONSES], "tools": FLAT}, MESSAGES: {**ASK[MESSAGES], "tools": CUSTOM}}
SPOKEN = Formats(reasoning="think")


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Each under its own name."""
    events = []
    for part in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def sent(house: House) -> list[dict[str, Any]]:
    return list(json.loads(house.requests[-1].parameters["messages"]))


def test_a_response_is_answered_in_one_piece(house: House) -> None:
    asked = {
        "input": "hello",
        "instructions": "be brief",
        "max_output_tokens": 9,
        "temperature": 0,
        "metadata": {"a": "b"},
    }
    reply = house.ask(streaming(), "POST", RESPONSES, asked)
    said = reply.json
    assert (reply.status, said["object"], said["status"], said["store"]) == (200, "response", "completed", False)
    assert said["instructions"] == "be brief"
    [item] = said["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "completed")
    assert item["content"] == [{"type": "output_text", "text": "Paris.", "annotations": [], "logprobs": []}]
    assert said["usage"]["total_tokens"] == 5 + 3
    assert said["usage"]["input_tokens_details"] == {"cached_tokens": 3}
    assert sent(house) == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert house.requests[0].inputs["max_tokens"] == [9]


def test_a_message_is_answered_in_one_piece(house: House) -> None:
    asked = {**ASK[MESSAGES], "system": [{"type": "text", "text": "be brief"}], "stop_sequences": ["END"]}
    reply = house.ask(streaming(), "POST", MESSAGES, {**asked, "metadata": {"user_id": "me"}})
    said = reply.json
    assert (reply.status, said["type"], said["role"], said["model"]) == (200, "message", "assistant", "tiny")
    assert said["content"] == [{"type": "text", "text": "Paris."}]
    assert (said["stop_reason"], said["stop_sequence"]) == ("end_turn", None)
    assert said["usage"] == {
        "input_tokens": 2,
        "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "output_tokens": 3,
    }
    assert sent(house)[0] == {"role": "system", "content": [{"type": "text", "text": "be brief"}]}
    [request] = house.requests
    assert (request.inputs["stop_words"], request.inputs["max_tokens"]) == (["END"], [8])
    assert request.parameters["tenant"] == "me"


def test_a_streamed_response_is_the_whole_one_at_its_end(house: House) -> None:
    whole = house.ask(streaming(CALLING), "POST", RESPONSES, WITH_TOOLS[RESPONSES], formats=FORMATS).json
    asked = {**WITH_TOOLS[RESPONSES], "stream": True}
    events = events_of(house.ask(streaming(CALLING), "POST", RESPONSES, asked, formats=FORMATS).body)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events][:2] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    done = events[-1]["response"]

    def bare(said: Any) -> Any:
        hidden = {"id", "call_id", "created_at"}
        return {name: value for name, value in said.items() if name not in hidden}

    assert bare({**done, "output": 0}) == bare({**whole, "output": 0})
    assert [bare(item) for item in done["output"]] == [bare(item) for item in whole["output"]]
    assert [item["type"] for item in done["output"]] == ["reasoning", "message", "function_call", "function_call"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == done["output"]
    for kind, text in (("output_text", "Let me see."), ("reasoning_text", "I add.")):
        assert "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta") == text
    calls = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(calls) == '{"a": 1}{}'
    assert len(calls) > 2, "arguments come as they are written"


def test_a_streamed_message_is_the_whole_one(house: House) -> None:
    whole = house.ask(streaming(CALLING), "POST", MESSAGES, WITH_TOOLS[MESSAGES], formats=FORMATS).json
    asked = {**WITH_TOOLS[MESSAGES], "stream": True}
    events = events_of(house.ask(streaming(CALLING), "POST", MESSAGES, asked, formats=FORMATS).body)
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    assert (whole["stop_reason"], events[-2]["delta"]["stop_reason"]) == ("tool_use", "tool_use")
    assert events[-2]["usage"] == whole["usage"]
    blocks: list[Any] = []
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "json"}[delta["type"]]
            blocks[event["index"]][name] += delta["partial_json" if name == "json" else name]
    said = json.dumps(blocks)
    assert [block["type"] for block in blocks] == [block["type"] for block in whole["content"]], said
    assert blocks[0]["thinking"] == whole["content"][0]["thinking"] == "I add."
    assert blocks[1]["text"] == whole["content"][1]["text"] == "Let me see."
    assert [json.loads(block["json"]) for block in blocks[2:]] == [{"a": 1}, {}]
    assert [block["input"] for block in whole["content"][2:]] == [{"a": 1}, {}]
    assert [block["name"] for block in blocks[2:]] == ["add", "subtract"]


def test_an_answer_that_was_cut_off_says_so(house: House) -> None:
    model = saying(last("<think>Hm. Wh", 9, reason="length"))
    said = house.ask(model, "POST", RESPONSES, ASK[RESPONSES], formats=SPOKEN).json
    assert (said["status"], said["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in said["output"]] == ["incomplete"]
    assert house.ask(model, "POST", MESSAGES, ASK[MESSAGES], formats=SPOKEN).json["stop_reason"] == "max_tokens"


def test_a_conversation_with_calls_is_the_same_in_all_three_forms() -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "2"},
    ]
    items = [
        {"role": "user", "content": "1?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "function_call", "call_id": "abcdefghi", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "abcdefghi", "output": "2"},
    ]
    use = {"type": "tool_use", "id": "abcdefghi", "name": "add", "input": {"a": 1}}
    messages = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "abcdefghi", "content": "2"}]},
    ]
    assert Responses().to_chat({"input": items})["messages"] == chat
    assert Messages().to_chat({"messages": messages, "max_tokens": 1})["messages"] == chat


WRONG: list[tuple[str, dict[str, Any], str]] = [
    (RESPONSES, {"store": True}, "store"),
    (RESPONSES, {"previous_response_id": "resp_1"}, "previous_response_id"),
    (RESPONSES, {"background": True}, "background"),
    (RESPONSES, {"input": []}, "input"),
    (RESPONSES, {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    (RESPONSES, {"input": [{"content": "x"}]}, "input"),
    (RESPONSES, {"instructions": 1}, "instructions"),
    (RESPONSES, {"max_output_tokens": "9"}, "max_output_tokens"),
    (RESPONSES, {"text": {"format": {"type": "yaml"}}}, "text.format.type"),
    (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"reasoning": {"effort": "high"}}, "reasoning.effort"),
    (RESPONSES, {"tools": [{"type": "web_search"}]}, "tools[0]"),
    (RESPONSES, {"tools": [{"type": "function"}]}, "tools[0].name"),
    (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
    (RESPONSES, {"n": 2}, "n"),
    (RESPONSES, {"prompt_logprobs": 0}, "prompt_logprobs"),
    (MESSAGES, {"prompt_logprobs": 2}, "prompt_logprobs"),
    (MESSAGES, {"metadata": {"user_id": 7}}, "metadata.user_id"),
    (MESSAGES, {"max_tokens": None}, "max_tokens"),
    (MESSAGES, {"max_tokens": "9"}, "max_tokens"),
    (MESSAGES, {"messages": []}, "messages"),
    (MESSAGES, {"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    (MESSAGES, {"messages": [{"role": "assistant", "content": "x"}]}, "messages[0].role"),
    (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
    (MESSAGES, {"system": 1}, "system"),
    (MESSAGES, {"stop_sequences": [1]}, "stop_sequences"),
    (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice"),
    (MESSAGES, {"tool_choice": {"type": "some"}}, "tool_choice"),
    (MESSAGES, {"output_format": {"type": "yaml"}}, "output_format"),
    (MESSAGES, {"output_config": {"effort": "high"}}, "output_config"),
    (MESSAGES, {"tools": [{"input_schema": {}}]}, "tools[0].name"),
    (MESSAGES, {"tools": [{"name": "a", "input_schema": [1]}]}, "tools[0].input_schema"),
    (MESSAGES, {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
]


@pytest.mark.parametrize(("path", "fields", "param"), WRONG, ids=str)
def test_what_is_wrong_is_named_in_each_ones_own_words(
    house: House, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = house.ask(streaming(), "POST", path, {**ASK[path], **fields}, formats=FORMATS)
    error = reply.json["error"]
    assert reply.status == 400
    assert error["message"].startswith(f"{param}: given ")
    if path == MESSAGES:
        assert (reply.json["type"], error["type"]) == ("error", "invalid_request_error")
        assert reply.json["request_id"] == reply.headers["x-request-id"]
    else:
        assert error["param"] == param
    assert not house.requests


@pytest.mark.parametrize("path", ASK)
def test_an_error_in_a_running_stream_is_its_last_event(house: House, path: str) -> None:
    model = saying(chunk("Par"), RuntimeError("FAILED: broken"))
    reply = house.ask(model, "POST", path, {**ASK[path], "stream": True})
    events = events_of(reply.body)
    assert (reply.status, events[-1]["type"]) == (200, "error")
    assert "broken" in json.dumps(events[-1])
    assert house.counted(path, "FAILED") == 1


@pytest.mark.parametrize("path", ASK)
def test_other_models_and_ways_are_refused(house: House, path: str) -> None:
    assert house.ask(streaming(), "POST", path, {**ASK[path], "model": "other"}).status == 404
    assert house.ask(streaming(), "GET", path).status == 405
    assert house.ask(streaming(), "POST", path, b"[").status == 400


def test_anthropics_clients_send_their_key_in_a_header_of_its_own(house: House, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text('[sk-a]\ntenant = "one"\n')
    keys = read_keys(file)
    ask = ("POST", MESSAGES, ASK[MESSAGES])
    assert house.ask(streaming(), *ask, keys=keys, headers={"x-api-key": "sk-a"}).status == 200
    assert house.requests[-1].parameters["tenant"] == "one"
    refused = house.ask(streaming(), *ask, keys=keys, headers={"x-api-key": "sk-b"})
    assert (refused.status, refused.json["error"]["type"]) == (401, "authentication_error")


def test_no_body_of_any_kind_is_a_fault_of_ours() -> None:
    odd: list[Any] = [None, 0, "", "x", [], [1], [None], {}, {"type": 1}, [{}], [{"type": "text"}], [[[]]], True]
    names = ("input", "messages", "system", "instructions", "tools", "tool_choice", "text", "reasoning", "metadata")
    good = {"input": "x", "messages": ASK[MESSAGES]["messages"], "max_tokens": 1}
    for endpoint in (Responses(), Messages()):
        for name in (*names, "thinking", "store", "stop_sequences"):
            for value in odd:
                for inner in (value, [{"role": "user", "content": value}], [{"type": value}], {"type": value}):
                    with contextlib.suppress(ApiError):
                        read_ask(CHAT, endpoint.to_chat({**good, name: inner}))


def stopped_by(word: str) -> Any:
    """A model that speaks and is stopped by a word of the request's."""

    def model(request: Received) -> Any:
        yield chunk("Par")
        yield {**last(), "stop_reason": ("BYTES", [json.dumps(word)])}

    return model


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_sequence_is_told_by_its_name(house: House, stream: bool) -> None:
    body = {**ASK[MESSAGES], "max_tokens": 9, "stop_sequences": ["is"], "stream": stream}
    reply = house.ask(stopped_by("is"), "POST", MESSAGES, body)
    [said] = [x["delta"] for x in events_of(reply.body) if x["type"] == "message_delta"] if stream else [reply.json]
    assert (said["stop_reason"], said["stop_sequence"]) == ("stop_sequence", "is")
    reply = house.ask(streaming(), "POST", MESSAGES, {**ASK[MESSAGES], "max_tokens": 9})
    assert (reply.json["stop_reason"], reply.json["stop_sequence"]) == ("end_turn", None)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_choices_tell_what_stopped_them(house: House, path: str) -> None:
    asked = HELLO if "chat" in path else {"prompt": "hello"}
    assert house.ask(stopped_by("is"), "POST", path, asked).json["choices"][0]["stop_reason"] == "is"
    ends = house.ask(stopped_by("is"), "POST", path, {**asked, "stream": True}).events
    assert [event["choices"][0].get("stop_reason") for event in ends] == [*[None] * (len(ends) - 1), "is"]
    assert "stop_reason" not in house.ask(streaming(), "POST", path, asked).json["choices"][0]
