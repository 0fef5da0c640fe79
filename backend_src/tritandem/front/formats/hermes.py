"""Hermes, Qwen 2.5 and 3, SmolLM: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere. Pure."""

from __future__ import annotations

from .call_json import Known, read_calls
from .structure import ANY_TEXT, Calls, Part, either, in_text, json_calls, tags
from .text import Reading, Text, drop

BEGIN, END = "<tool_call>", "</tool_call>"


def hermes(text: Text, known: Known) -> Reading[None]:
    while (yield from text.until((BEGIN,), text.say)):
        if (told := (yield from read_calls(text, None))) is not None:
            text.say(BEGIN + told)
            continue
        yield from text.blank(drop)
        yield from text.mark(END)


def structure(calls: Calls, several: bool, other: Part | None) -> Part:
    made = json_calls(calls, "arguments", f"{BEGIN}\n", f"\n{END}")
    if other is ANY_TEXT:
        return in_text(BEGIN, made, several)
    must = tags(made, "\n", several)
    return must if other is None else either(must, other)
