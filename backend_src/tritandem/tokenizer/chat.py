"""Messages to a prompt, with the model's own chat template.

Owns validation of messages and the rendering through transformers' `apply_chat_template`. Knows nothing about
encoding. Any thread: rendering shares no state.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from ..contracts import InvalidRequest
from .segments import Markers, Segment, strings_in
from .source import AddedToken, TokenizerSource

KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "model", "tool", "function", "ipython"})
MAX_ROLE_CHARS = 64


class ChatRenderer:
    """Renders conversations of one model. `control_tokens` are what a user must not be able to write."""

    def __init__(self, source: TokenizerSource) -> None:
        self._renderer = source.renderer
        self._has_template = bool(template_text(source))
        self.control_tokens = control_tokens(source)
        parameters = inspect.signature(source.renderer.apply_chat_template).parameters
        self._reserved = frozenset(parameters) | {"messages"}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt as text. Raises InvalidRequest naming the message."""
        self._check(messages, variables)
        return self._render(messages, add_generation_prompt, tools, variables)

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> tuple[str, list[Segment] | None]:
        """The prompt as text, and as segments where the messages hold control tokens (else None)."""
        self._check(messages, variables)
        untrusted = (list(messages), tools, dict(variables))
        markers = Markers(untrusted, self.control_tokens)
        if not markers.needed(untrusted):
            return self._render(messages, add_generation_prompt, tools, variables), None
        marked_messages, marked_tools, marked_variables = markers.mark(untrusted)
        rendered = self._render(marked_messages, add_generation_prompt, marked_tools, marked_variables)
        segments = markers.cut(rendered)
        return "".join(segment.text for segment in segments), segments

    def _render(self, messages: Any, add_generation_prompt: bool, tools: Any, variables: Mapping[str, Any]) -> str:
        try:
            rendered = self._renderer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, tools=tools, **variables
            )
        except Exception as error:  # a template is a program: it raises what it likes
            raise InvalidRequest(
                "messages", f"{type(error).__name__}: {error}", "what the chat template accepts"
            ) from error
        return str(rendered)

    def _check(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> None:
        if not self._has_template:
            raise InvalidRequest("messages", "messages", "text_input: this model has no chat template")
        if not isinstance(messages, (list, tuple)) or not messages:
            raise InvalidRequest("messages", messages, "a list of at least one message")
        for index, message in enumerate(messages):
            check_message(f"messages[{index}]", message, self.control_tokens)
        for name in variables:
            if name in self._reserved:
                raise InvalidRequest(name, variables[name], "names that the chat template itself defines")


def check_message(field: str, message: object, control: Sequence[AddedToken]) -> None:
    """Raises InvalidRequest for a message without a sound role or content."""
    if not isinstance(message, Mapping):
        raise InvalidRequest(field, message, "an object with role and content")
    role = message.get("role")
    if not isinstance(role, str) or not role or len(role) > MAX_ROLE_CHARS:
        raise InvalidRequest(f"{field}.role", role, f"a string of 1 to {MAX_ROLE_CHARS} characters")
    if role not in KNOWN_ROLES and (not role.isidentifier() or any(role in token.content for token in control)):
        # Templates write "<|" + role + "|>": a role that is the inside of a control token would become that token.
        raise InvalidRequest(f"{field}.role", role, f"one of {', '.join(sorted(KNOWN_ROLES))}")
    content = message.get("content")
    if content is None and not message.get("tool_calls"):
        raise InvalidRequest(f"{field}.content", content, "a string, or a list of parts")
    if content is not None and not isinstance(content, (str, list)):
        raise InvalidRequest(f"{field}.content", content, "a string, or a list of parts")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise InvalidRequest(f"{field}.content[{index}]", part, "an object with a type")


def template_text(source: TokenizerSource) -> str:
    """The chat template, or all of several named ones; empty without any."""
    return "\0".join(strings_in(getattr(source.renderer, "chat_template", None)))


def control_tokens(source: TokenizerSource) -> tuple[AddedToken, ...]:
    """The tokens that steer the model: the special ones, and others that the template itself writes."""
    text = template_text(source)
    return tuple(
        token
        for token in source.added_tokens
        if token.special or (token.content in text and not token.content.isspace())
    )
