"""The messages of a chat, parsed: in the tokenizer's process only, never in the one that delivers tokens.

Pure. The shape only; roles and contents are the chat template's to judge.
"""

from __future__ import annotations

from typing import Any

from ...contracts.errors import InvalidRequest
from . import client_json
from .prompt_source import MAX_CHAT_CHARS

MAX_MESSAGES = 10_000


def read_messages(chat: str) -> list[dict[str, Any]]:
    """Raises InvalidRequest."""
    messages = client_json.parse("messages", chat, MAX_CHAT_CHARS, "a JSON list of {role, content}")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise InvalidRequest("messages", chat, "a non-empty JSON list of {role, content}")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"{len(messages)} messages", f"at most {MAX_MESSAGES}")
    return messages
