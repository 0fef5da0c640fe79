"""/tokenize and /detokenize in vLLM's shapes, Anthropic's count of tokens: the model `tokenizer` is asked."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from tritandem_client import AsyncClient
from tritandem_client.errors import error_from_server
from tritandem_client.request import WireRequest
from tritandem_client.tensors import InputTensor

from ..contracts import error_codec
from . import fields
from .errors import invalid, not_honoured
from .messages import Messages

MODEL = "tokenizer"
Lookup = Callable[[AsyncClient, Mapping[str, Any], str, "int | None"], Awaitable[dict[str, Any]]]
TIMEOUT_S = 60.0
# Fields that must say nothing else.
_NEUTRAL: Mapping[str, Any] = {
    "return_token_strs": False,
    "add_generation_prompt": True,
    "continue_final_message": False,
}


async def tokenize(
    client: AsyncClient, document: Mapping[str, Any], request_id: str, context_tokens: int | None
) -> dict[str, Any]:
    """The ids of a prompt or a chat. Raises ApiError and TritandemClientError."""
    for name, neutral in _NEUTRAL.items():
        if document.get(name) not in (None, neutral):
            raise not_honoured(name, document[name], f"{json.dumps(neutral)} alone")
    prompt, messages, tools = (document.get(name) for name in ("prompt", "messages", "tools"))
    if (prompt is None) == (messages is None):
        raise invalid("prompt", "none or both", "one of prompt and messages", "missing_required_parameter")
    # Triton wants a tensor in every request: an empty text goes with a chat.
    tensors = [InputTensor("text_input", "BYTES", (fields.text("prompt", prompt or ""),))]
    parameters: dict[str, str | int | bool] = {}
    if messages is not None:
        parameters["messages"] = json.dumps(fields.messages("messages", messages), ensure_ascii=False)
        if tools:
            parameters["tools"] = json.dumps(fields.tools("tools", tools), ensure_ascii=False)
    elif (add := document.get("add_special_tokens")) is not None:
        tensors.append(InputTensor("add_special_tokens", "BOOL", (fields.flag("add_special_tokens", add),)))
    ids = (await _ask(client, request_id, tensors, parameters))["input_ids"]
    return {"count": len(ids), "max_model_len": context_tokens, "tokens": ids, "token_strs": None}


async def count_tokens(
    client: AsyncClient, document: Mapping[str, Any], request_id: str, context_tokens: int | None
) -> dict[str, Any]:
    """How many ids a body of /v1/messages has, by which no answer is asked for. Raises ApiError and
    TritandemClientError."""
    chat = Messages().to_chat({"max_tokens": 1, **document})
    tools = None if chat.get("tool_choice") == "none" else chat.get("tools")
    said = await tokenize(client, {"messages": chat["messages"], "tools": tools}, request_id, context_tokens)
    return {"input_tokens": said["count"]}


async def detokenize(
    client: AsyncClient, document: Mapping[str, Any], request_id: str, context_tokens: int | None
) -> dict[str, Any]:
    """The text of ids. Raises ApiError and TritandemClientError."""
    ids = fields.ids("tokens", document.get("tokens"))
    if not all(0 <= one < 2**31 for one in ids):
        raise invalid("tokens", next(one for one in ids if not 0 <= one < 2**31), "token ids")
    if not ids:
        return {"prompt": ""}
    said = await _ask(client, request_id, [InputTensor("input_ids", "INT32", tuple(ids))], {})
    return {"prompt": said["text_output"][0]}


async def _ask(
    client: AsyncClient, request_id: str, tensors: list[InputTensor], parameters: dict[str, str | int | bool]
) -> dict[str, list[Any]]:
    said: dict[str, list[Any]] = {}
    async for outputs in client.open_call(WireRequest(MODEL, request_id, tuple(tensors), parameters, False), TIMEOUT_S):
        said |= outputs
    if refusal := "".join(said["refusal"]):
        raise error_from_server(error_codec.unpack(json.loads(refusal)).public_message())
    return said
