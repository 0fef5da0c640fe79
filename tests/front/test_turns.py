"""Calls of functions and thoughts through the application, with a scripted model behind it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tritandem.front.formats.choose import Formats

from tests.client.scripts import chunk, last, saying, streaming
from tests.front.test_app import CHAT, HELLO, House, house

__all__ = ["house"]
FORMATS = Formats("hermes", "think")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("add", "subtract")
]
CALLING = [
    "<think>I ",
    "add.</think>Let me see. <tool",
    '_call>{"name": "add", "arguments": {"a"',
    ": 1}}</tool_call>\n<tool_call>",
    '{"name": "subtract", "arguments": {}}</tool_call>',
]
FUNCTIONS = [{"name": "add", "arguments": '{"a": 1}'}, {"name": "subtract", "arguments": "{}"}]


def put_together(events: list[Any], index: int = 0) -> tuple[dict[str, Any], list[str]]:
    """(message, reasons of its end), as clients add deltas up."""
    message: dict[str, Any] = {"tool_calls": []}
    reasons = []
    for event in events:
        for choice in event["choices"]:
            if choice["index"] != index:
                continue
            reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            for name, value in choice["delta"].items():
                if name != "tool_calls":
                    message[name] = message.get(name, "") + value
                    continue
                for part in value:
                    if "id" in part:
                        assert part.pop("index") == len(message["tool_calls"])
                        message["tool_calls"].append(part)
                    else:
                        call = message["tool_calls"][part["index"]]
                        call["function"]["arguments"] += part["function"]["arguments"]
    return message, reasons


def test_calls_and_thoughts_are_the_same_in_one_piece_and_in_a_stream(house: House) -> None:
    asked = {**HELLO, "tools": TOOLS, "parallel_tool_calls": True}
    [choice] = house.ask(streaming(CALLING), "POST", CHAT, asked, formats=FORMATS).json["choices"]
    events = house.ask(streaming(CALLING), "POST", CHAT, {**asked, "stream": True}, formats=FORMATS).events
    streamed, reasons = put_together(events)
    for message in (choice["message"], streamed):
        assert (message["content"], message["reasoning_content"]) == ("Let me see.", "I add.")
        assert [call["function"] for call in message["tool_calls"]] == FUNCTIONS
        assert all(call["type"] == "function" and len(call["id"]) == 9 for call in message["tool_calls"])
    assert [choice["finish_reason"], *reasons] == ["tool_calls", "tool_calls"]
    assert json.loads(house.requests[0].parameters["tools"]) == TOOLS


def test_only_one_call_when_only_one_is_wanted(house: House) -> None:
    asked = {**HELLO, "tools": TOOLS, "parallel_tool_calls": False}
    [choice] = house.ask(streaming(CALLING), "POST", CHAT, asked, formats=FORMATS).json["choices"]
    assert [call["function"] for call in choice["message"]["tool_calls"]] == FUNCTIONS[:1]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_was_cut_off_says_so(house: House, stream: bool) -> None:
    model = saying(last("".join(CALLING[:3]), 9, reason="length"))
    reply = house.ask(model, "POST", CHAT, {**HELLO, "tools": TOOLS, "stream": stream}, formats=FORMATS)
    if stream:
        message, [reason] = put_together(reply.events)
    else:
        message, reason = reply.json["choices"][0]["message"], reply.json["choices"][0]["finish_reason"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a"']
    assert reason == "length"


def test_tools_that_may_not_be_called_are_not_sent_and_text_stays_text(house: House) -> None:
    asked = {**HELLO, "tools": TOOLS, "tool_choice": "none"}
    [choice] = house.ask(streaming(CALLING[2:]), "POST", CHAT, asked, formats=FORMATS).json["choices"]
    assert "tool_calls" not in choice["message"]
    assert choice["message"]["content"] == "".join(CALLING[2:])
    assert "tools" not in house.requests[0].parameters


def test_a_model_that_cannot_call_is_no_model_for_tools(house: House) -> None:
    reply = house.ask(streaming(), "POST", CHAT, {**HELLO, "tools": TOOLS})
    assert (reply.status, reply.json["error"]["param"]) == (400, "tools")
    assert "--openai-tool-parser" in reply.json["error"]["message"]


def test_each_choice_is_read_by_itself(house: House) -> None:
    asked = {**HELLO, "n": 2, "stream": True, "tools": TOOLS}
    pieces = [chunk(text, sequence_index=("INT32", [index])) for text in CALLING for index in (0, 1)]
    ends = [{**last(), "sequence_index": ("INT32", [index])} for index in (0, 1)]
    events = house.ask(saying(*pieces, *ends), "POST", CHAT, asked, formats=FORMATS).events
    for index in (0, 1):
        message, _ = put_together(events, index)
        assert [call["function"] for call in message["tool_calls"]] == FUNCTIONS


def test_log_probabilities_of_what_is_read_get_lost_nowhere(house: House) -> None:
    said = '[{"7": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}]'
    pieces = [chunk(text, logprobs=("BYTES", [said])) for text in CALLING]
    asked = {**HELLO, "stream": True, "tools": TOOLS, "logprobs": True}
    events = house.ask(saying(*pieces, last()), "POST", CHAT, asked, formats=FORMATS).events
    told = [one for event in events for one in (event["choices"][0].get("logprobs") or {}).get("content", ())]
    assert [one["token"] for one in told] == ["x"] * len(CALLING)


def test_the_history_of_calls_reaches_the_model_as_it_is(house: House) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": FUNCTIONS[0]}
    messages = [
        *HELLO["messages"],
        {"role": "assistant", "content": None, "reasoning_content": "I add.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "2"},
    ]
    assert house.ask(streaming(), "POST", CHAT, {"messages": messages}).status == 200
    assert json.loads(house.requests[0].parameters["messages"]) == messages


HARMONY = [
    "<|channel|>analysis<|mess",
    "age|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>",
    '{"a"',
    ": 1}",
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tools", [False, True])
def test_parts_of_a_harmony_answer_are_told_apart_by_control_tokens_that_are_asked_for(
    house: House, stream: bool, tools: bool
) -> None:
    asked = {**HELLO, **({"tools": TOOLS} if tools else {}), "stream": stream, "stop_token_ids": [5]}
    reply = house.ask(streaming(HARMONY), "POST", CHAT, asked, formats=Formats("harmony", "harmony"))
    message = put_together(reply.events)[0] if stream else reply.json["choices"][0]["message"]
    assert message["reasoning_content"] == "I add."
    assert [call["function"] for call in message["tool_calls"]] == FUNCTIONS[:1]
    [said] = house.requests[0].inputs["sampling_parameters"]
    assert json.loads(said) == {"skip_special_tokens": False, "stop_token_ids": [5]}


def test_control_tokens_are_asked_for_where_nothing_is_told_apart_by_them_only_by_the_client(house: House) -> None:
    house.ask(streaming(CALLING), "POST", CHAT, {**HELLO, "tools": TOOLS}, formats=FORMATS)
    assert "sampling_parameters" not in house.requests[0].inputs
    house.ask(streaming(), "POST", CHAT, {**HELLO, "skip_special_tokens": False})
    assert json.loads(house.requests[0].inputs["sampling_parameters"][0]) == {"skip_special_tokens": False}
