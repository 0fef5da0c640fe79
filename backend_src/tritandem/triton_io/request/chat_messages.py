"""The messages and tools of a chat, parsed: in the tokenizer's process only, never in the one that delivers tokens.

Pure. The shape only; roles and contents are the chat template's to judge.
"""

from __future__ import annotations

from typing import Any

from ...contracts.errors import InvalidRequest
from . import client_json
from .prompt_source import MAX_CHAT_CHARS, MAX_TOOLS_CHARS

MAX_MESSAGES = 10_000
MAX_TOOLS = 256
MAX_TOOL_DEPTH = 64
MAX_NAME_CHARS = 128


def read_messages(chat: str) -> list[dict[str, Any]]:
    """Raises InvalidRequest."""
    messages = client_json.parse("messages", chat, MAX_CHAT_CHARS, "a JSON list of {role, content}")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise InvalidRequest("messages", chat, "a non-empty JSON list of {role, content}")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"{len(messages)} messages", f"at most {MAX_MESSAGES}")
    return messages


def read_tools(text: str | None) -> list[dict[str, Any]] | None:
    """None for none. Raises InvalidRequest naming the tool."""
    if text is None:
        return None
    allowed = "a JSON list of {type: function, function: {name, description, parameters}}"
    tools = client_json.parse("tools", text, MAX_TOOLS_CHARS, allowed)
    if not isinstance(tools, list):
        raise InvalidRequest("tools", text, allowed)
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest("tools", f"{len(tools)} tools", f"at most {MAX_TOOLS}")
    for index, tool in enumerate(tools):
        check_tool(f"tools[{index}]", tool)
        if client_json.deeper_than(tool, MAX_TOOL_DEPTH):
            raise InvalidRequest(f"tools[{index}]", f"more than {MAX_TOOL_DEPTH} levels", "fewer")
    return tools or None


def check_tool(field: str, tool: object) -> None:
    """Raises InvalidRequest for what is no function with a name."""
    if not isinstance(tool, dict) or tool.get("type", "function") != "function":
        raise InvalidRequest(field, tool, "an object {type: function, function}")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise InvalidRequest(f"{field}.function", function, "an object with name, description and parameters")
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
        raise InvalidRequest(f"{field}.function.name", name, f"a text of 1 to {MAX_NAME_CHARS} characters")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{field}.function.description", description, "a text")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{field}.function.parameters", parameters, "an object, a JSON schema")
