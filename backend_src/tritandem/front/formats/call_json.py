"""A call as a JSON object {"name", "arguments"}, or a list of such: what several formats have in common. Pure."""

from __future__ import annotations

import json
from collections.abc import Collection

from .text import Reading, Text, drop

ARGUMENTS = ("arguments", "parameters")
Known = Collection[str]


def read_call(text: Text, known: Known | None) -> Reading[str | None]:
    """One object. None once a call was read; else what was taken, because it is no call. `known`: names that may be
    called, None for any. Arguments go on as they come; what is malformed behind their beginning stays as it is."""
    taken: list[str] = []
    name, early, begun = "", "", False
    yield from text.blank(taken.append)
    if not (yield from _take(text, "{", taken)):
        return "".join(taken)
    while True:
        yield from text.blank(taken.append)
        if (yield from text.peek()) != '"':
            break
        key = yield from _string(text, taken)
        yield from text.blank(taken.append)
        if not (yield from _take(text, ":", taken)):
            break
        yield from text.blank(taken.append)
        if key == "name" and not begun and not name:
            name = yield from _string(text, taken)
            if not name or (known is not None and name not in known):
                return "".join(taken)
        elif key in ARGUMENTS and name and not begun:
            text.call(name)
            begun = True
            yield from _arguments(text)
        elif key in ARGUMENTS and not begun and not early:
            early = yield from _collect(text, taken)
        else:
            yield from text.value(taken.append)
        yield from text.blank(taken.append)
        if not (yield from _take(text, ",", taken)):
            break
    closed = yield from _take(text, "}", taken)
    if begun:
        return None
    if not (name and closed):
        return "".join(taken)
    text.call(name)
    text.arguments(_plain(early))
    return None


def read_calls(text: Text, known: Known | None) -> Reading[str | None]:
    """One object or a list of them, as `read_call`. Of a list, what follows the last call is left where it is."""
    taken: list[str] = []
    yield from text.blank(taken.append)
    listed = yield from _take(text, "[", taken)
    before = text.calls
    while True:
        told = yield from read_call(text, known)
        if told is not None:
            break
        if listed:
            yield from text.blank(drop)
        if not listed or not (yield from text.literal(",")):
            break
    if text.calls == before:
        return "".join(taken) + (told or "")
    if told:
        text.say(told)
    if listed:
        yield from text.literal("]")
    return None


def _arguments(text: Text) -> Reading[None]:
    if (yield from text.peek()) == "{":
        yield from text.value(text.arguments)
        return
    taken: list[str] = []
    text.arguments(_plain((yield from _collect(text, taken))))


def _plain(given: str) -> str:
    """Of arguments that are no object: some models write its text as a JSON string, or null."""
    try:
        value = json.loads(given) if given else None
    except ValueError:
        return given
    return "{}" if value in (None, "") else value if isinstance(value, str) else given


def _collect(text: Text, taken: list[str]) -> Reading[str]:
    parts: list[str] = []
    yield from text.value(parts.append)
    taken += parts
    return "".join(parts)


def _string(text: Text, taken: list[str]) -> Reading[str]:
    """ "" for what is none."""
    given = yield from _collect(text, taken)
    try:
        value = json.loads(given)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _take(text: Text, char: str, taken: list[str]) -> Reading[bool]:
    if (yield from text.literal(char)):
        taken.append(char)
        return True
    return False
