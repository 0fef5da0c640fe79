"""/tokenize and /detokenize between a client and a scripted model `tokenizer`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tritandem.contracts import error_codec
from tritandem.contracts.errors import InvalidRequest

from tests.fakes.triton_protocol import Outputs, Received
from tests.front.test_app import HELLO, House, house
from tests.front.test_reading import TOOL

__all__ = ["house"]


def tokenizer(request: Received) -> Iterator[Outputs | Exception | None]:
    """Ids are character codes; the text "long" and the id 7 are refused, as the plug does."""
    assert request.model == "tokenizer"
    refusal = ""
    if request.prompt == "long" or request.inputs.get("input_ids") == [7]:
        field = "text_input" if request.prompt else "input_ids"
        refusal = json.dumps(error_codec.pack(InvalidRequest(field, "9 tokens", "at most 8 tokens")))
    ids = request.inputs.get("input_ids") or [ord(char) for char in request.prompt] or [1]
    yield {
        "input_ids": ("INT32", ids),
        "refusal": ("BYTES", [refusal]),
        "text_output": ("BYTES", ["".join(map(chr, ids))]),
    }


def test_a_prompt_has_ids_and_ids_have_a_text(house: House) -> None:
    reply = house.ask(tokenizer, "POST", "/tokenize", {"prompt": "hé", "add_special_tokens": False})
    assert reply.json == {"count": 2, "max_model_len": None, "tokens": [104, 233], "token_strs": None}
    assert house.requests[0].inputs["add_special_tokens"] == [False]
    assert house.ask(tokenizer, "POST", "/detokenize", {"tokens": [104, 233]}).json == {"prompt": "hé"}
    assert house.ask(tokenizer, "POST", "/detokenize", {"tokens": []}).json == {"prompt": ""}


def test_a_chat_has_ids_with_its_tools(house: House) -> None:
    reply = house.ask(tokenizer, "POST", "/tokenize", {**HELLO, "tools": [TOOL], "model": "tiny"})
    assert reply.json["tokens"] == [1]
    [request] = house.requests
    assert json.loads(request.parameters["messages"])[0]["content"] == "hello"
    assert json.loads(request.parameters["tools"]) == [TOOL]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", **HELLO}, 400, "prompt"),
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"prompt": "x", "return_token_strs": True}, 400, "return_token_strs"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "long"}, 400, "prompt"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [7]}, 400, "tokens"),
    ],
    ids=str,
)
def test_what_is_wrong_is_named(house: House, path: str, body: dict[str, Any], status: int, param: str) -> None:
    reply = house.ask(tokenizer, "POST", path, body)
    assert (reply.status, reply.json["error"]["param"]) == (status, param)
    assert house.counted(path, "REJECTED_INVALID") == 1


def test_a_body_of_messages_is_counted_with_its_system_text_and_tools(house: House) -> None:
    tool = {"name": "get_weather", "input_schema": {"type": "object"}}
    body = {**HELLO, "model": "tiny", "system": "Be brief.", "tools": [tool]}
    reply = house.ask(tokenizer, "POST", "/v1/messages/count_tokens", body)
    assert reply.json == {"input_tokens": 1}
    [request] = house.requests
    assert [one["role"] for one in json.loads(request.parameters["messages"])] == ["system", "user"]
    assert json.loads(request.parameters["tools"])[0]["function"]["name"] == "get_weather"
    house.ask(tokenizer, "POST", "/v1/messages/count_tokens", {**body, "tool_choice": {"type": "none"}})
    assert "tools" not in house.requests[-1].parameters


def test_what_cannot_be_counted_is_said_in_anthropics_shape(house: House) -> None:
    for body, field in (({}, "messages"), ({**HELLO, "tools": [{"name": 1}]}, "tools[0]")):
        reply = house.ask(tokenizer, "POST", "/v1/messages/count_tokens", body)
        assert (reply.status, reply.json["type"]) == (400, "error")
        assert field in reply.json["error"]["message"]
