"""Mistral: [TOOL_CALLS] and a list of {"name", "arguments"}, or, from 2025 on, name{...} for each. Pure.

The mark is a control token, which answers do not show: without it a call is one that an answer begins with and that
names a function of the request.
"""

from __future__ import annotations

from .call_json import Known, read_calls
from .structure import ANY_TEXT, Calls, Part, either, in_text, json_calls, schema, tag, tags
from .text import Reading, Text

MARK, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def mistral(text: Text, known: Known) -> Reading[None]:
    before: list[str] = []
    yield from text.blank(before.append)
    if not (yield from text.literal(MARK)):
        text.say("".join(before))
        yield from _unmarked(text, known)
        if not (yield from text.until((MARK,), text.say)):
            return
    while True:
        yield from _marked(text)
        if not (yield from text.until((MARK,), text.say)):
            return


def _unmarked(text: Text, known: Known) -> Reading[None]:
    if (yield from text.peek()) == "[":
        text.say((yield from read_calls(text, known)) or "")
        return
    while found := (yield from text.literal(*(name + "{" for name in known), *(name + ARGS for name in known))):
        name = found.removesuffix("{").removesuffix(ARGS)
        if found.endswith("{"):
            text.put_back("{")
        text.call(name)
        yield from text.value(text.arguments)
        between: list[str] = []
        yield from text.blank(between.append)
        text.say("".join(between))


def _marked(text: Text) -> Reading[None]:
    before: list[str] = []
    yield from text.blank(before.append)
    if (yield from text.peek()) in ("[", "{"):
        if (told := (yield from read_calls(text, None))) is not None:
            text.say(MARK + "".join(before) + told)
        return
    found = yield from text.until((ID, ARGS, "{"), before.append)
    name = "".join(before).strip()
    if not found or not name or len(name.split()) > 1:
        text.say(MARK + "".join(before) + found)
        return
    if found == ID:
        yield from text.until((ARGS,), before.append)
    elif found == "{":
        text.put_back("{")
    text.call(name)
    yield from text.value(text.arguments)


def structure(calls: Calls, several: bool, other: Part | None) -> Part:
    """All of its forms: which one the model was taught it knows best."""
    listed = tags(json_calls(calls, "arguments"), ", ", several)
    older = [tag(f"{MARK}{space}[", listed, "]") for space in ("", " ")]
    newer = [tag(f"{MARK}{name}{mark}", schema(one), "") for name, one in calls.items() for mark in (ARGS, "")]
    if other is ANY_TEXT:
        return in_text(MARK, [*older, *newer], several)
    must = either(*older, tags(newer, "", several))
    return must if other is None else either(must, other)
