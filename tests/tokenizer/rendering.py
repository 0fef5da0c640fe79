"""What tests ask of a tokenizer and servers do not: a chat as text, its ids at once, which ids are control tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tritandem.tokenizer import Encoded, TextTokenizer


def render_chat(
    tokenizer: TextTokenizer,
    messages: Sequence[dict[str, Any]],
    add_generation_prompt: bool = True,
    tools: Sequence[dict[str, Any]] | None = None,
    **variables: Any,
) -> str:
    """Raises InvalidRequest naming the message that is wrong."""
    return tokenizer._chat.render(messages, add_generation_prompt, tools, variables)


def encode_chat(tokenizer: TextTokenizer, messages: Sequence[dict[str, Any]], **options: Any) -> Encoded:
    """As `submit_chat`, waiting for the result. Raises InvalidRequest or EngineFailed."""
    return tokenizer.submit_chat(messages, **options).result(timeout=60)


def special_ids(tokenizer: TextTokenizer) -> set[int]:
    return {token.id for token in tokenizer._source.added_tokens if token.special}
