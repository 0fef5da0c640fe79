"""What a request asks about: exactly one of text, chat messages and token ids; or it stops another one.

Pure. Used by the tokenizer (which turns it into ids) and by the scheduler (which validates the rest). A chat stays the
text that it came as: to parse it is the tokenizer's (see chat_messages).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ...contracts.arrays import Int32Array
from ...contracts.errors import InvalidRequest
from .sampling_fields import KNOWN_NAMES, is_sampling_name
from .schema import DRAIN_KEY, DRAIN_TIMEOUT_MS, GRAMMAR, IGNORED_PARAMETERS, INPUT_OF_NAME, PARAMETERS
from .tensor_values import Inputs

MAX_CHAT_CHARS = 1 << 24
MAX_TOOLS_CHARS = 1 << 20
MAX_COMPARED_CHARS = 64
MAX_TENANT_CHARS = 128
_OTHERS = IGNORED_PARAMETERS | {DRAIN_KEY, DRAIN_TIMEOUT_MS, GRAMMAR}


@dataclass(frozen=True, slots=True)
class PromptSource:
    """One of the fields is set; none when `stop` is. `chat`: the JSON text of messages, as the client wrote it."""

    text: str | None = None
    chat: str | None = None
    tools: str | None = None  # beside `chat`: the JSON text of the functions that the model may call
    input_ids: Int32Array | None = None
    stop: bool = False
    add_special_tokens: bool = True  # to `text`

    @property
    def chars(self) -> int:
        """Characters to encode, roughly: what tells short work from long."""
        return len(self.text or self.chat or "") + len(self.tools or "")

    @property
    def field_name(self) -> str:
        """The input to name when the prompt is too long."""
        if self.text is not None:
            return "text_input"
        return "messages" if self.chat is not None else "input_ids"


def read_parameters(text: str) -> dict[str, Any]:
    """Triton's JSON of a request's custom parameters. Raises InvalidRequest for a name that nobody reads."""
    if not text:
        return {}
    try:
        parameters: dict[str, Any] = json.loads(text)
    except ValueError as error:  # Triton writes what no JSON can hold, such as an infinite number
        raise InvalidRequest("parameters", f"not JSON ({error})", "names and values that JSON can hold") from error
    for name in parameters:
        if name not in PARAMETERS and name not in _OTHERS and not is_sampling_name(name):
            if name in INPUT_OF_NAME:
                raise InvalidRequest(name, "a parameter", "an input tensor of this name")
            allowed = f"{', '.join((*PARAMETERS, *KNOWN_NAMES))}, or an input{_perhaps(name)}"
            raise InvalidRequest(name, "an unknown parameter", allowed)
    return parameters


def _perhaps(name: str) -> str:
    """The name that was probably meant, as a question. Comparing long ones would take time."""
    known = [*INPUT_OF_NAME, *KNOWN_NAMES, *PARAMETERS]
    meant = get_close_matches(name, known, 1) if len(name) <= MAX_COMPARED_CHARS else []
    return f" (did you mean {meant[0]}?)" if meant else ""


def read_tenant(parameters: Mapping[str, Any]) -> str:
    """ "" where none is named. Raises InvalidRequest."""
    value = parameters.get("tenant", "")
    if not isinstance(value, str) or len(value) > MAX_TENANT_CHARS:
        raise InvalidRequest("tenant", value, f"a text of at most {MAX_TENANT_CHARS} characters")
    return value


def read_prompt(inputs: Inputs, parameters: Mapping[str, Any]) -> PromptSource:
    """Raises InvalidRequest for none, several, an empty one, invalid UTF-8, a chat that is no text."""
    if inputs.flag("stop"):
        return PromptSource(stop=True)
    text, input_ids = inputs.text("text_input"), inputs.ids("input_ids")
    chat = parameters.get("messages")
    if text == "" and chat is not None:
        text = None  # Triton wants a tensor in every request: an empty text goes with a chat
    given = [
        name
        for name, value in (("text_input", text), ("input_ids", input_ids), ("messages", chat))
        if value is not None
    ]
    if len(given) != 1:
        named = " and ".join(given) or "none of them"
        raise InvalidRequest(given[0] if given else "text_input", named, "one of text_input, input_ids, messages")
    if text == "":
        raise InvalidRequest("text_input", text, "at least one character")
    if input_ids is not None and not len(input_ids):
        raise InvalidRequest("input_ids", "no ids", "at least one id")
    add_special_tokens = inputs.flag("add_special_tokens")
    if add_special_tokens and text is None:
        raise InvalidRequest(
            "add_special_tokens", True, "true with text_input only: nothing is added to a chat or to ids"
        )
    add = add_special_tokens is not False
    lengths = inputs.number("input_lengths")
    if lengths is not None and (input_ids is None or lengths != len(input_ids)):
        allowed = "input_ids beside it" if input_ids is None else f"{len(input_ids)}, the number of input_ids"
        raise InvalidRequest("input_lengths", lengths, allowed)
    tools = _read_json_text("tools", parameters.get("tools"), MAX_TOOLS_CHARS)
    if tools is not None and chat is None:
        raise InvalidRequest("tools", "without messages", "beside messages: a chat's template says what may be called")
    chat = _read_json_text("messages", chat, MAX_CHAT_CHARS)
    return PromptSource(text, chat, tools, input_ids, add_special_tokens=add)


def _read_json_text(name: str, given: object, max_chars: int) -> str | None:
    """As it came; whether it is JSON is the tokenizer's to find out."""
    if given is None:
        return None
    if not isinstance(given, str):
        raise InvalidRequest(name, type(given).__name__, "a JSON text")
    if len(given) > max_chars:
        raise InvalidRequest(name, f"{len(given)} characters", f"at most {max_chars} characters")
    try:
        given.encode()
    except UnicodeEncodeError as error:  # JSON can write half a character
        raise InvalidRequest(name, f"half a character at {error.start}", "text that UTF-8 can express") from None
    return given
