"""What a request asks about: exactly one of text, chat messages and token ids; or it stops another one.

Pure. Used by the tokenizer (which turns it into ids) and by the scheduler (which validates the rest).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from ...contracts.arrays import Int32Array
from ...contracts.errors import InvalidRequest
from . import client_json
from .sampling_fields import KNOWN_NAMES, is_sampling_name
from .schema import DRAIN_KEY, DRAIN_TIMEOUT_MS, INPUT_OF_NAME, PARAMETERS
from .tensor_values import Inputs

MAX_MESSAGES = 10_000
MAX_MESSAGES_CHARS = 1 << 24
MAX_COMPARED_CHARS = 64
MAX_TENANT_CHARS = 128


@dataclass(frozen=True, slots=True)
class PromptSource:
    """One of the fields is set; none when `stop` is."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    input_ids: Int32Array | None = None
    stop: bool = False

    @property
    def chars(self) -> int:
        """Characters to encode, roughly: what tells short work from long."""
        if self.text is not None:
            return len(self.text)
        contents = (message.get("content") for message in self.messages or ())
        return sum(len(content if isinstance(content, str) else str(content)) for content in contents)

    @property
    def field_name(self) -> str:
        """The input to name when the prompt is too long."""
        if self.text is not None:
            return "text_input"
        return "messages" if self.messages is not None else "input_ids"


def read_parameters(text: str) -> dict[str, Any]:
    """Triton's JSON of a request's custom parameters. Raises InvalidRequest for a name that nobody reads."""
    if not text:
        return {}
    try:
        parameters: dict[str, Any] = json.loads(text)
    except ValueError as error:  # Triton writes what no JSON can hold, such as an infinite number
        raise InvalidRequest("parameters", f"not JSON ({error})", "names and values that JSON can hold") from error
    for name in parameters:
        if name not in PARAMETERS and name not in (DRAIN_KEY, DRAIN_TIMEOUT_MS) and not is_sampling_name(name):
            allowed = f"an input, or one of {', '.join(PARAMETERS)}{_perhaps(name)}"
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
    """Raises InvalidRequest for none, several, an empty one, invalid UTF-8, malformed messages."""
    if inputs.flag("stop"):
        return PromptSource(stop=True)
    text, input_ids = inputs.text("text_input"), inputs.ids("input_ids")
    raw_messages = parameters.get("messages")
    if text == "" and raw_messages is not None:
        text = None  # Triton wants a tensor in every request: an empty text goes with a chat
    given = [
        name
        for name, value in (("text_input", text), ("input_ids", input_ids), ("messages", raw_messages))
        if value is not None
    ]
    if len(given) != 1:
        named = " and ".join(given) or "none of them"
        raise InvalidRequest(given[0] if given else "text_input", named, "one of text_input, input_ids, messages")
    if text == "":
        raise InvalidRequest("text_input", text, "at least one character")
    if input_ids is not None and not len(input_ids):
        raise InvalidRequest("input_ids", "no ids", "at least one id")
    messages = None if raw_messages is None else _read_messages(raw_messages)
    return PromptSource(text, messages, input_ids)


def _read_messages(raw: object) -> list[dict[str, Any]]:
    """The shape only; roles and contents are the chat template's to judge."""
    if not isinstance(raw, str):
        raise InvalidRequest("messages", type(raw).__name__, "a JSON text")
    messages = client_json.parse("messages", raw, MAX_MESSAGES_CHARS, "a JSON list of {role, content}")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise InvalidRequest("messages", raw, "a non-empty JSON list of {role, content}")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"{len(messages)} messages", f"at most {MAX_MESSAGES}")
    return messages
