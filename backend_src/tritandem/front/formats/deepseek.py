"""DeepSeek V3, R1 and V3.1: calls between tokens of their own, with the arguments fenced or bare. Pure."""

from __future__ import annotations

from .call_json import Known
from .structure import ANY_TEXT, Calls, Part, either, in_text, schema, tag, tags
from .text import Reading, Text, drop

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def deepseek(text: Text, known: Known) -> Reading[None]:
    while mark := (yield from text.until((CALLS, CALL, CALLS_END), text.say)):
        if mark != CALL:
            continue
        head: list[str] = []
        found = yield from text.until((SEPARATOR, CALL_END), head.append)
        if found != SEPARATOR:
            text.say(CALL + "".join(head) + found)
            continue
        if "".join(head).strip() == "function":  # the older form: the name has a line of its own
            head.clear()
            yield from text.until(("\n",), head.append)
        text.call("".join(head).strip())
        if (yield from text.until(("{", CALL_END, CALLS_END), drop)) == "{":
            text.put_back("{")
            yield from text.value(text.arguments)
            yield from text.until((CALL_END, CALLS_END), drop)
        else:
            text.arguments("{}")


def structure(calls: Calls, several: bool, other: Part | None) -> Part:
    """Both of its forms."""
    fenced = [
        tag(f"{CALL}function{SEPARATOR}{name}\n```json\n", schema(one), f"\n```{CALL_END}")
        for name, one in calls.items()
    ]
    bare = [tag(f"{CALL}{name}{SEPARATOR}", schema(one), CALL_END) for name, one in calls.items()]
    must = tag(CALLS, either(tags(fenced, "\n", several), tags(bare, "", several)), CALLS_END)
    if other is ANY_TEXT:
        return in_text(CALLS, [must], False)
    return must if other is None else either(must, other)
