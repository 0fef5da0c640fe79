"""Messages to a prompt, with the model's own chat template.

Owns the validation of messages, the choice of the template and the names of what is refused. Knows nothing about
encoding. Any thread.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from ...contracts.errors import ConfigError, InvalidRequest
from ..files.source import AddedToken, TokenizerSource
from .authorship import TooLarge
from .chat_template import ChatTemplate
from .segments import ControlTokens, Segment
from .template_bounds import TooMuchWork
from .template_sandbox import TemplateSandbox

KNOWN_ROLES = frozenset({"system", "developer", "user", "assistant", "model", "tool", "function", "ipython"})
MAX_ROLE_CHARS = 64
MAX_REASON_CHARS = 500


class ChatRenderer:
    """Renders conversations of one model. Raises ConfigError for a template that does not end."""

    def __init__(self, source: TokenizerSource) -> None:
        self._renderer = source.renderer
        self._control_tokens = control_tokens(source)
        self._control = ControlTokens(self._control_tokens)
        parameters = inspect.signature(source.renderer.apply_chat_template).parameters
        self._reserved = frozenset(parameters) | {"messages"}
        sandbox, special_tokens = TemplateSandbox(), dict(source.renderer.special_tokens_map)
        self._templates: dict[str, ChatTemplate | Exception] = {}
        for text in template_texts(source):
            try:
                self._templates[text] = ChatTemplate(sandbox, text, special_tokens)
            except (TooLarge, TooMuchWork) as error:
                raise ConfigError(f"the model's chat template turns one short message into {error}") from error
            except Exception as error:  # malformed: text alone can be served
                self._templates[text] = error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt as text. Raises InvalidRequest naming the message."""
        return str.__str__(self._render(messages, add_generation_prompt, tools, variables))

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> tuple[str, list[Segment] | None]:
        """The prompt as text, and as segments where a message holds what must not be a control token (else None)."""
        prompt = self._render(messages, add_generation_prompt, tools, variables)
        return str.__str__(prompt), self._control.segments(prompt)

    def _render(self, messages: Any, add_generation_prompt: bool, tools: Any, variables: Mapping[str, Any]) -> str:
        self._check(messages, tools, variables)
        template = self._template(tools)
        try:
            return template.render(template.prepare(messages), tools, add_generation_prompt, variables)
        except InvalidRequest:
            raise
        except Exception as error:  # a template is a program: it raises what it likes
            raise _refused(messages, error) from error

    def _template(self, tools: Any) -> ChatTemplate:
        """The template for these tools: a model may have several."""
        try:
            found = self._templates[self._renderer.get_chat_template(tools=tools)]
        except ValueError as error:  # several, and none of them the default
            raise InvalidRequest("tools", "none" if tools is None else "tools", str(error)) from error
        if isinstance(found, Exception):
            raise InvalidRequest("messages", "messages", f"text_input: the model's chat template is malformed: {found}")
        return found

    def _check(self, messages: Sequence[Mapping[str, Any]], tools: Any, variables: Mapping[str, Any]) -> None:
        if not self._templates:
            raise InvalidRequest("messages", "messages", "text_input: this model has no chat template")
        if not isinstance(messages, (list, tuple)) or not messages:
            raise InvalidRequest("messages", messages, "a list of at least one message")
        for index, message in enumerate(messages):
            check_message(f"messages[{index}]", message, self._control_tokens)
        for index, tool in enumerate(() if tools is None else tools):
            if not isinstance(tool, Mapping):
                raise InvalidRequest(f"tools[{index}]", tool, "an object with type and function")
        for name in variables:
            if name in self._reserved:
                raise InvalidRequest(name, variables[name], "a name that the chat template does not define itself")


def _refused(messages: Sequence[Any], error: Exception) -> InvalidRequest:
    """What a template said, whole unless it says too much."""
    said = (
        str(error) if isinstance(error, (TemplateError, TooLarge, TooMuchWork)) else f"{type(error).__name__}: {error}"
    )
    if len(said) > MAX_REASON_CHARS:
        said = f"{said[:MAX_REASON_CHARS]}..."
    return InvalidRequest("messages", f"{len(messages)} messages", f"what the chat template accepts; it says: {said}")


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


def template_texts(source: TokenizerSource) -> list[str]:
    """The chat template, or all of several named ones; empty without any."""
    return [text for text in _templates_of(source).values() if text]


def template_text(source: TokenizerSource) -> str:
    """All templates as one text, to look for tokens in."""
    return "\0".join(template_texts(source))


def _templates_of(source: TokenizerSource) -> dict[str, str]:
    given = getattr(source.renderer, "chat_template", None)
    return given if isinstance(given, dict) else {"default": given or ""}


def control_tokens(source: TokenizerSource) -> tuple[AddedToken, ...]:
    """The tokens that steer the model: the special ones, and others that the template itself writes."""
    text = template_text(source)
    return tuple(
        token
        for token in source.added_tokens
        if token.special or (token.content in text and not token.content.isspace())
    )
