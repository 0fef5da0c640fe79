"""Thoughts before the answer, <think>...</think>, and then whatever format the answer has. Pure."""

from __future__ import annotations

from collections.abc import Callable

from .text import Reading, Text, drop

BEGIN, END = "<think>", "</think>"


def think(text: Text, inside: bool, then: Callable[[Text], Reading[None]]) -> Reading[None]:
    """`inside`: the prompt has opened the thought already."""
    before: list[str] = []
    yield from text.blank(before.append)
    if (yield from text.literal(BEGIN)) or inside:
        yield from text.blank(drop)
        yield from text.until((END,), text.think)
        yield from text.blank(drop)
    else:
        text.put_back("".join(before))
    yield from then(text)
