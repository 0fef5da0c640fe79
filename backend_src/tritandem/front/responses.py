"""/v1/responses: a turn of a conversation that the client keeps. Nothing is stored. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from tritandem_client import Result

from .ask import Ask
from .errors import ApiError, invalid, not_honoured
from .formats.turn import MadeCall
from .narrator import Event, Narrator, parts_of, refuse

# Fields that say nothing with these values alone, and would change the answer with others.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "store": (False,),
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "context_management": ([],),
    "n": (1,),
    "logprobs": (False,),
    "prompt_logprobs": (),
}
WITHOUT_EFFECT = ("include", "stream_options")
RENAMED = {"max_output_tokens": "max_tokens"}
_PARAMS = {"max_tokens": "max_output_tokens", "messages": "input"}
_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


class Responses:
    id_prefix = "resp_"

    def to_chat(self, document: dict[str, Any]) -> dict[str, Any]:
        chat = {RENAMED.get(name, name): value for name, value in document.items() if value is not None}
        refuse(chat, NEUTRAL)
        _format(chat)
        if isinstance(chosen := chat.get("tool_choice"), dict) and chosen.get("type") == "function":
            chat["tool_choice"] = {"type": "function", "function": {"name": chosen.get("name")}}
        _refuse_beside(chat.pop("reasoning", {}), "reasoning", "summary", "auto")
        for name in WITHOUT_EFFECT:
            chat.pop(name, None)
        messages = _messages(chat.pop("input", None))
        if (instructions := chat.pop("instructions", None)) is not None:
            if not isinstance(instructions, str):
                raise invalid("instructions", instructions, "a string")
            messages.insert(0, {"role": "system", "content": instructions})
        if "tools" in chat:
            chat["tools"] = _tools(chat["tools"])
        return {**chat, "messages": messages}

    def param(self, name: str) -> str:
        if name.startswith("response_format"):
            return name.replace("response_format", "text.format").replace(".json_schema", "")
        head = name.partition("[")[0].partition(".")[0]
        return _PARAMS.get(head, name).replace("].function", "]")

    def narrator(self, document: dict[str, Any], ask: Ask, request_id: str, model: str, now_s: int) -> Narrator:
        return ResponsesNarrator(document, request_id, model, now_s)

    def error(self, error: ApiError, request_id: str) -> bytes:
        return error.body()

    def error_event(self, error: ApiError, request_id: str) -> Event:
        return {"type": "error", "code": error.code, "message": str(error), "param": error.param}


def _format(chat: dict[str, Any]) -> None:
    """The format of the text as a chat has it: a schema stands one level higher here."""
    text = chat.pop("text", {})
    given = text.pop("format", None) if isinstance(text, dict) else None
    _refuse_beside(text, "text", "verbosity", "medium")
    if given is None:
        return
    if isinstance(given, dict) and given.get("type") == "json_schema":
        given = {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}
    chat["response_format"] = given


def _refuse_beside(value: Any, name: str, key: str, neutral: Any) -> None:
    if not isinstance(value, dict):
        raise invalid(name, value, "an object")
    for inner, given in value.items():
        if given is not None and not (inner == key and given == neutral):
            raise not_honoured(f"{name}.{inner}", given, "nothing: it is not offered")


def _tools(tools: Any) -> Any:
    """Functions are flat here; what is no list is refused as a chat's would be."""
    if not isinstance(tools, list):
        return tools
    made = []
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise not_honoured(f"tools[{index}]", tool, "an object of type function")
        made.append({"type": "function", "function": {name: tool[name] for name in tool if name != "type"}})
    return made


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str) and given:
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise invalid("input", given, "a text or a list of items")
    messages: list[dict[str, Any]] = []
    thought = ""
    for index, item in enumerate(given):
        field = f"input[{index}]"
        if not isinstance(item, dict):
            raise invalid(field, item, "an object")
        kind = item.get("type", "message")
        if kind == "message":
            message = {"role": item.get("role"), "content": _content(f"{field}.content", item.get("content"))}
            if message["role"] == "developer":
                message["role"] = "system"
        elif kind == "function_call":
            called = {"name": _text(field, item, "name"), "arguments": _text(field, item, "arguments")}
            call = {"id": _text(field, item, "call_id"), "type": "function", "function": called}
            before = messages[-1] if messages and not thought else {}
            if before.get("role") == "assistant":  # one turn, in several items
                before.setdefault("tool_calls", []).append(call)
                continue
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind == "function_call_output":
            said = _content(f"{field}.output", item.get("output"))
            message = {"role": "tool", "tool_call_id": _text(field, item, "call_id"), "content": said}
        elif kind == "reasoning":
            thought = "\n".join(part["text"] for part in parts_of(field, item.get("content") or [], _TEXTS))
            continue
        else:
            raise not_honoured(f"{field}.type", kind, "message, function_call, function_call_output, reasoning")
        if thought and message["role"] == "assistant":
            message["reasoning_content"] = thought
        thought = ""
        messages.append(message)
    if not messages:
        raise invalid("input", given, "at least one message")
    return messages


def _content(field: str, content: Any) -> Any:
    if isinstance(content, str):
        return content
    return [{"type": "text", "text": part["text"]} for part in parts_of(field, content, _TEXTS)]


def _text(field: str, item: Mapping[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{field}.{name}", value, "a string")
    return value


class ResponsesNarrator:
    def __init__(self, asked: Mapping[str, Any], request_id: str, model: str, now_s: int) -> None:
        self._number = 0
        self._items: list[dict[str, Any]] = []
        echoed = ("instructions", "max_output_tokens", "temperature", "top_p", "user")
        self._said = {
            "id": request_id,
            "object": "response",
            "created_at": now_s,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            **{name: asked.get(name) for name in echoed},
            "metadata": asked.get("metadata") or {},
            "model": model,
            "output": self._items,
            "parallel_tool_calls": asked.get("parallel_tool_calls") is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "text": {"format": (asked.get("text") or {}).get("format") or {"type": "text"}},
            "tool_choice": asked.get("tool_choice") or "auto",
            "tools": asked.get("tools") or [],
            "truncation": "disabled",
            "usage": None,
        }

    def begin(self) -> Iterator[Event]:
        yield self._event("response.created", response=self.document())
        yield self._event("response.in_progress", response=self.document())

    def open_text(self, thought: bool) -> Iterator[Event]:
        if thought:
            item = {"id": _id("rs_"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        else:
            item = {"id": _id("msg_"), "type": "message", "role": "assistant", "content": [], "status": "in_progress"}
        yield from self._open(item)
        yield self._inside("response.content_part.added", content_index=0, part=_part("", thought))

    def text(self, text: str, thought: bool) -> Iterator[Event]:
        more: dict[str, Any] = {} if thought else {"logprobs": []}
        yield self._inside(f"response.{_kind(thought)}.delta", content_index=0, delta=text, **more)

    def close_text(self, text: str, thought: bool) -> Iterator[Event]:
        more: dict[str, Any] = {} if thought else {"logprobs": []}
        part = _part(text, thought)
        yield self._inside(f"response.{_kind(thought)}.done", content_index=0, text=text, **more)
        yield self._inside("response.content_part.done", content_index=0, part=part)
        self._items[-1]["content"] = [part]
        yield from self._close()

    def open_call(self, call: MadeCall) -> Iterator[Event]:
        about = {"call_id": call.id, "name": call.name, "arguments": ""}
        yield from self._open({"id": _id("fc_"), "type": "function_call", "status": "in_progress", **about})

    def arguments(self, text: str) -> Iterator[Event]:
        yield self._inside("response.function_call_arguments.delta", delta=text)

    def close_call(self, call: MadeCall) -> Iterator[Event]:
        self._items[-1]["arguments"] = call.arguments
        yield self._inside("response.function_call_arguments.done", name=call.name, arguments=call.arguments)
        yield from self._close()

    def end(self, reason: str, result: Result, called: bool) -> Iterator[Event]:
        whole = reason != "length"
        status = "completed" if whole else "incomplete"
        if not whole and self._items:
            self._items[-1]["status"] = status
        self._said |= {
            "status": status,
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "usage": {
                "input_tokens": result.num_input_tokens,
                "input_tokens_details": {"cached_tokens": result.cached_tokens},
                "output_tokens": result.num_output_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": result.num_input_tokens + result.num_output_tokens,
            },
        }
        yield self._event(f"response.{status}", response=self.document())

    def document(self) -> dict[str, Any]:
        return {**self._said, "output": [dict(item) for item in self._items]}

    def _open(self, item: dict[str, Any]) -> Iterator[Event]:
        self._items.append(item)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=dict(item))

    def _close(self) -> Iterator[Event]:
        self._items[-1]["status"] = "completed"
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=dict(self._items[-1]))

    def _inside(self, kind: str, **more: Any) -> Event:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **more)

    def _event(self, kind: str, **more: Any) -> Event:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **more}


def _kind(thought: bool) -> str:
    return "reasoning_text" if thought else "output_text"


def _part(text: str, thought: bool) -> dict[str, Any]:
    return {"type": _kind(thought), "text": text, **({} if thought else {"annotations": [], "logprobs": []})}


def _id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)
