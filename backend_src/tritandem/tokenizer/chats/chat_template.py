"""One chat template: what it takes, found out by asking it, and rendering in the form it takes.

Templates agree on no form for content (a text, or a list of parts) nor for a tool call's arguments (an object, or its
JSON text), and fail silently on the other one. Owns the questions and the change of form. Any thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...contracts.errors import InvalidRequest
from .authorship import CLIENT, MODEL, Authored, TooLarge
from .template_bounds import TooMuchWork
from .template_sandbox import TemplateSandbox

MODEL_ROLES = frozenset({"assistant", "model"})
MEDIA = frozenset(f"{form}{kind}" for kind in ("image", "audio", "video", "file") for form in ("", "input_"))
MEDIA |= {f"{kind}_url" for kind in ("image", "audio", "video", "file")}
REASONING = ("reasoning_content", "thinking", "reasoning")  # the first is what templates read, but for gpt-oss
USUAL_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *REASONING})
# A conversation to ask with: WORD is where the answer shows whether a form was understood.
WORD, FUNCTION = "Qz7", "ask_template"
OBJECT = {"city": WORD}
# A call without an answer: some templates refuse a content beside it, others read it whether there is any or not.
_BESIDE: tuple[Mapping[str, str | None], ...] = ({}, {"content": ""}, {"content": None})
Message = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Messages in the template's form with the authors of their texts."""

    messages: list[Message]
    chars: int  # of the contents


class ChatTemplate:
    """A compiled template. Raises TemplateError for a malformed one, TooLarge or TooMuchWork for an endless one."""

    def __init__(self, sandbox: TemplateSandbox, text: str, special_tokens: Mapping[str, Any]) -> None:
        self._sandbox = sandbox
        self._special_tokens = special_tokens
        self._template = sandbox.template(text)
        self._takes_text = {role: self._shows(role, WORD) for role in _ASKING}
        self._takes_parts = {role: self._shows(role, [{"type": "text", "text": WORD}]) for role in _ASKING}
        self._takes_objects = self._shows_arguments(OBJECT) or not self._shows_arguments(json.dumps(OBJECT))
        form = OBJECT if self._takes_objects else json.dumps(OBJECT)
        self._beside_calls = max(_BESIDE, key=lambda beside: self._takes_calls(form, beside))

    def render(self, prepared: Prepared, tools: Any, add_generation_prompt: bool, variables: Mapping[str, Any]) -> str:
        """The prompt with its authors. Raises whatever the template raises, TooLarge and TooMuchWork among it."""
        given = {
            **self._special_tokens,
            "documents": None,
            **{_marked(name, CLIENT): _marked(value, CLIENT) for name, value in variables.items()},
            "messages": prepared.messages,
            "tools": _marked(tools, CLIENT),
            "add_generation_prompt": add_generation_prompt,
        }
        return self._sandbox.render(self._template, prepared.chars, given)

    def prepare(self, messages: Sequence[Mapping[str, Any]]) -> Prepared:
        """Checked messages in this template's form. Raises InvalidRequest naming what has no such form."""
        prepared, chars = [], 0
        for index, message in enumerate(messages):
            role, field = message["role"], f"messages[{index}]"
            author = MODEL if role in MODEL_ROLES else CLIENT
            ready: Message = {"role": role}
            for key, value in message.items():
                if key == "content" and value is not None:
                    chars += len(value)
                    ready[key] = _marked(self._content(f"{field}.content", role, value), author)
                elif key == "tool_calls" and value is not None:
                    ready[key] = _marked(self._tool_calls(f"{field}.tool_calls", value), author)
                elif key != "role" and value is not None:
                    ready[key if key in USUAL_KEYS else _marked(key, author)] = _marked(value, author)
            if "tool_calls" in ready:
                ready = {**self._beside_calls, **ready}
            thought = next((ready[key] for key in REASONING if key in ready), None)
            if thought is not None:
                ready = {"thinking": thought, **ready, "reasoning_content": thought}
            prepared.append(ready)
        return Prepared(prepared, chars)

    def _content(self, field: str, role: str, content: str | list[Any]) -> str | list[Any]:
        asked = _asked_as(role)
        if isinstance(content, str):
            wrap = not self._takes_text[asked] and self._takes_parts[asked]
            return [{"type": "text", "text": content}] if wrap else content
        for index, part in enumerate(content):
            text_alone = not self._takes_parts[asked] and part["type"] != "text"
            if text_alone or part["type"] in MEDIA:
                raise InvalidRequest(f"{field}[{index}].type", part["type"], "text: this model reads nothing else")
            if part["type"] == "text" and not isinstance(part.get("text"), str):
                raise InvalidRequest(f"{field}[{index}].text", part.get("text"), "a string")
        return content if self._takes_parts[asked] else "\n".join(part["text"] for part in content)

    def _tool_calls(self, field: str, calls: Any) -> list[Any]:
        if not isinstance(calls, list):
            raise InvalidRequest(field, calls, "a list of tool calls")
        return [self._tool_call(f"{field}[{index}]", call) for index, call in enumerate(calls)]

    def _tool_call(self, field: str, call: Any) -> Any:
        if not isinstance(call, Mapping):
            raise InvalidRequest(field, call, "an object with a function")
        if "function" in call:
            return {**call, "function": self._function(f"{field}.function", call["function"])}
        return self._function(field, call)

    def _function(self, field: str, function: Any) -> Any:
        if not isinstance(function, Mapping):
            raise InvalidRequest(field, function, "an object with name and arguments")
        if "arguments" not in function:
            return function
        given = function["arguments"]
        as_object = _object(f"{field}.arguments", given)
        if self._takes_objects:
            return {**function, "arguments": as_object}
        as_text = given if isinstance(given, str) and given else json.dumps(as_object, ensure_ascii=False)
        return {**function, "arguments": as_text}

    def _shows(self, role: str, content: Any) -> bool:
        """Whether a message of `role` with this content comes out as text."""
        rendered = [
            self._asked([*before, {"role": role, "content": content}, *after]) for before, after in _ASKING[role]
        ]
        return any(WORD in text and "'type'" not in text and '"type"' not in text for text in rendered)

    def _shows_arguments(self, arguments: Any) -> bool:
        """Whether a tool call with these arguments comes out as it should."""
        return any(self._takes_calls(arguments, beside)[0] for beside in _BESIDE)

    def _takes_calls(self, arguments: Any, beside: Mapping[str, str | None]) -> tuple[int, int]:
        """How many conversations with a tool call come out as they should (no Python, no JSON inside JSON), and how
        many at all, with `beside` in its message."""
        wanted = WORD if isinstance(arguments, dict) else arguments
        texts = [self._asked(messages, tools) for messages, tools in _calls(arguments, beside)]
        shown = [FUNCTION in text and wanted in text and "{'" not in text for text in texts]
        return sum(shown), sum(map(bool, texts))

    def _asked(self, messages: list[Message], tools: Any = None) -> str:
        try:
            given = {**self._special_tokens, "documents": None, "messages": messages, "tools": tools}
            return self._sandbox.render(self._template, 0, {**given, "add_generation_prompt": True})
        except (TooLarge, TooMuchWork):
            raise
        except Exception:  # a refusal, in the template's own way
            return ""


def prompt_to_answer(text: str) -> str | None:
    """What the template `text` makes of a short question, for the model to go on from; None: nothing that ends."""
    try:
        template = ChatTemplate(TemplateSandbox(), text, {"bos_token": "", "eos_token": ""})
        return str(template.render(template.prepare([_QUESTION]), None, True, {}))
    except Exception:  # malformed, endless, or a refusal
        return None


def _call(arguments: Any, **content: str | None) -> Message:
    function = {"name": FUNCTION, "arguments": arguments}
    return {
        "role": "assistant",
        **content,
        "tool_calls": [{"id": "callabcde", "type": "function", "function": function}],
    }


def _calls(arguments: Any, beside: Mapping[str, str | None]) -> Iterator[tuple[list[Message], Any]]:
    """Conversations with a tool call: templates differ in what has to stand beside it."""
    question = {"role": "user", "content": "Hi"}
    answer = {"role": "tool", "name": FUNCTION, "tool_call_id": "callabcde", "content": "5"}
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "other", "description": "Asks.", "parameters": parameters}}
    for tools in (None, [tool]):
        yield [question, _call(arguments, **beside), answer], tools
        yield [question, _call(arguments, **beside)], tools


_QUESTION: Message = {"role": "user", "content": "Hi"}
# For each role: what may stand before and after a message of it.
_ASKING: dict[str, list[tuple[list[Message], list[Message]]]] = {
    "user": [([], [])],
    "system": [([], [_QUESTION])],
    "assistant": [([_QUESTION], [_QUESTION])],
    "tool": [([_QUESTION, _call(form, content="")], []) for form in (OBJECT, json.dumps(OBJECT))],
}


def _asked_as(role: str) -> str:
    if role in MODEL_ROLES:
        return "assistant"
    kin = {"developer": "system", "function": "tool", "ipython": "tool"}.get(role, role)
    return kin if kin in _ASKING else "user"


def _object(field: str, arguments: Any) -> dict[str, Any]:
    """A tool call's arguments, from an object or its JSON text; an empty text is a call without any."""
    allowed = "a JSON object, as such or as text"
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(field, arguments, f"{allowed} ({error})") from error
    else:
        parsed = {} if arguments is None else arguments
    if not isinstance(parsed, dict):
        raise InvalidRequest(field, arguments, allowed)
    return parsed


def _marked(value: Any, author: int) -> Any:
    """A copy in which every text, keys among them, has its author."""
    if isinstance(value, str):
        return Authored(value, ((0, len(value), author),)) if value else value
    if isinstance(value, Mapping):
        return {_marked(key, author): _marked(item, author) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marked(item, author) for item in value]
    return value
