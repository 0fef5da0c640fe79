"""Anthropic's /v1/messages: its bodies, blocks and errors. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tritandem_client import Result

from .ask import Ask
from .errors import ApiError, invalid, not_honoured
from .formats.turn import MadeCall
from .narrator import Event, Narrator, parts_of, refuse

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "thinking": ({"type": "disabled"},),
    "mcp_servers": ([],),
    "container": (),
    "context_management": (),
    "n": (1,),
    "logprobs": (False,),
    "prompt_logprobs": (),
}
RENAMED = {"stop_sequences": "stop"}
_PARAMS = {"stop": "stop_sequences", "user": "metadata.user_id"}
_FORMAT = "response_format.json_schema"
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "not_found_error"}
_KINDS |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}


class Messages:
    id_prefix = "msg_"

    def to_chat(self, document: dict[str, Any]) -> dict[str, Any]:
        chat = {RENAMED.get(name, name): value for name, value in document.items() if value is not None}
        if "max_tokens" not in chat:
            raise invalid("max_tokens", "nothing", "it must be given", "missing_required_parameter")
        refuse(chat, NEUTRAL)
        _format(chat)
        messages = _messages(chat.get("messages"))
        if system := chat.pop("system", None):
            messages.insert(0, {"role": "system", "content": _texts("system", system)})
        _choose_tools(chat)
        metadata = chat.pop("metadata", {})
        if isinstance(metadata, dict) and metadata.get("user_id") is not None:
            chat["user"] = metadata["user_id"]
        return {**chat, "messages": messages}

    def param(self, name: str) -> str:
        return (
            _PARAMS.get(name, name)
            .replace(_FORMAT, "output_format")
            .replace("].function", "]")
            .replace("].parameters", "].input_schema")
        )

    def narrator(self, document: dict[str, Any], ask: Ask, request_id: str, model: str, now_s: int) -> Narrator:
        return MessagesNarrator(request_id, model)

    def error(self, error: ApiError, request_id: str) -> bytes:
        return json.dumps(self.error_event(error, request_id)).encode()

    def error_event(self, error: ApiError, request_id: str) -> Event:
        kind = _KINDS.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": request_id}


def _format(chat: dict[str, Any]) -> None:
    """The format of the answer as a chat has it: of the older field, or of the newer, which could hold more."""
    config, older = chat.pop("output_config", {}), chat.pop("output_format", None)
    if not isinstance(config, dict) or not config.keys() <= {"format"}:
        raise not_honoured("output_config", config, "an object with format")
    field, given = ("output_format", older) if older is not None else ("output_config.format", config.get("format"))
    if given is None:
        return
    if not isinstance(given, dict) or given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise not_honoured(field, given, "an object {type: json_schema, schema}")
    chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": given["schema"]}}


def _choose_tools(chat: dict[str, Any]) -> None:
    """Tools and the choice among them as a chat has them."""
    if isinstance(tools := chat.get("tools"), list):
        chat["tools"] = [_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]
    choice = chat.pop("tool_choice", None)
    if choice is None:
        return
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind not in ("auto", "none", "any", "tool"):
        raise not_honoured("tool_choice", choice, "an object of type auto, none, any or tool")
    chat["tool_choice"] = {"any": "required"}.get(kind, kind)
    if kind == "tool":
        chat["tool_choice"] = {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False


def _tool(field: str, tool: Any) -> dict[str, Any]:
    if not isinstance(tool, dict) or tool.get("type", "custom") != "custom":
        raise not_honoured(field, tool, "an object with name, description and input_schema")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema") or {}}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise invalid("messages", given, "a list of at least one message")
    messages: list[dict[str, Any]] = []
    for index, message in enumerate(given):
        field = f"messages[{index}]"
        if not isinstance(message, dict):
            raise invalid(field, message, "an object with role and content")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise invalid(f"{field}.role", role, "user or assistant")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        else:
            messages += _from_blocks(f"{field}.content", role, content)
    if messages[-1]["role"] == "assistant":
        raise not_honoured(f"messages[{len(given) - 1}].role", "assistant", "user: an answer cannot be begun")
    return messages


def _from_blocks(field: str, role: str, blocks: Any) -> list[dict[str, Any]]:
    """Results of tools are messages of their own, before what the user says beside them."""
    if not isinstance(blocks, list) or not blocks:
        raise invalid(field, blocks, "a text or a list of blocks")
    results: list[dict[str, Any]] = []
    texts: list[dict[str, Any]] = []
    message: dict[str, Any] = {"role": role, "content": None}
    for index, block in enumerate(blocks):
        where = f"{field}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text":
            texts += parts_of(field, [block], ("text",), index)
        elif kind == "tool_result" and role == "user":
            said = _texts(f"{where}.content", block.get("content") or "")
            results.append({"role": "tool", "tool_call_id": _name(where, block, "tool_use_id"), "content": said})
        elif kind == "tool_use" and role == "assistant":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise invalid(f"{where}.input", arguments, "an object")
            function = {"name": _name(where, block, "name"), "arguments": json.dumps(arguments, ensure_ascii=False)}
            call = {"id": _name(where, block, "id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind == "thinking" and role == "assistant":
            message["reasoning_content"] = _name(where, block, "thinking")
        elif kind != "redacted_thinking":
            raise not_honoured(f"{where}.type", kind, "text, thinking, tool_use, tool_result, each where it belongs")
    if texts:
        message["content"] = texts[0]["text"] if len(texts) == 1 else texts
    return [*results, message] if texts or len(message) > 2 else results


def _texts(field: str, given: Any) -> Any:
    if isinstance(given, str):
        return given
    return parts_of(field, given, ("text",))


def _name(field: str, block: Mapping[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"{field}.{name}", value, "a string")
    return value


class MessagesNarrator:
    def __init__(self, request_id: str, model: str) -> None:
        self._blocks: list[dict[str, Any]] = []
        self._head = {"id": request_id, "type": "message", "role": "assistant", "model": model}
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._usage = {"input_tokens": 0, "output_tokens": 0}

    def begin(self) -> Iterator[Event]:
        yield {"type": "message_start", "message": self.document()}

    def open_text(self, thought: bool) -> Iterator[Event]:
        yield from self._open({"type": "thinking", "thinking": "", "signature": ""} if thought else _text(""))

    def text(self, text: str, thought: bool) -> Iterator[Event]:
        name = "thinking" if thought else "text"
        yield self._delta({"type": f"{name}_delta", name: text})

    def close_text(self, text: str, thought: bool) -> Iterator[Event]:
        self._blocks[-1]["thinking" if thought else "text"] = text
        yield from self._close()

    def open_call(self, call: MadeCall) -> Iterator[Event]:
        yield from self._open({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})

    def arguments(self, text: str) -> Iterator[Event]:
        yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close_call(self, call: MadeCall) -> Iterator[Event]:
        self._blocks[-1]["input"] = _object(call.arguments)
        yield from self._close()

    def end(self, reason: str, result: Result, called: bool) -> Iterator[Event]:
        word = result.stop_reason if isinstance(result.stop_reason, str) else None
        ended = "stop_sequence" if word is not None else "end_turn"
        self._end["stop_reason"] = "max_tokens" if reason == "length" else "tool_use" if called else ended
        self._end["stop_sequence"] = word
        self._usage = {
            "input_tokens": result.num_input_tokens - result.cached_tokens,
            "cache_read_input_tokens": result.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": result.num_output_tokens,
        }
        yield {"type": "message_delta", "delta": dict(self._end), "usage": self._usage}
        yield {"type": "message_stop"}

    def document(self) -> dict[str, Any]:
        return {**self._head, "content": list(self._blocks), **self._end, "usage": self._usage}

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        self._blocks.append(block)
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[Event]:
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _object(arguments: str) -> dict[str, Any]:
    """What the model wrote; under a name of ours where it is no object."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = None
    return value if isinstance(value, dict) else {"arguments": arguments}
