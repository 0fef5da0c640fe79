"""Llama 3.1 and later: the whole answer is {"name": ..., "parameters": {...}}, or several with ; between. Pure.

An object that names no function of the request is an answer in JSON.
"""

from __future__ import annotations

from typing import Any

from .call_json import Known, read_call
from .moved_schema import DEFINITIONS, moved
from .structure import ANY_TEXT, Calls, Part, either, json_calls, schema, tags
from .text import Reading, Text, drop

TAG = "<|python_tag|>"


def llama_json(text: Text, known: Known) -> Reading[None]:
    before: list[str] = []
    yield from text.blank(before.append)
    yield from text.literal(TAG)
    while True:
        yield from text.blank(before.append)
        if (yield from text.peek()) != "{":
            break
        if (told := (yield from read_call(text, known))) is not None:
            before.append(told)
            break
        before.clear()
        yield from text.blank(drop)
        yield from text.literal(";", ",")
    text.say("".join(before))
    yield from text.rest(text.say)


def structure(calls: Calls, several: bool, other: Part | None) -> Part:
    """What begins with a bracket is a call, unless the answer has a structure of its own."""
    must = tags(json_calls(calls, "parameters"), "; ", several)
    if other is None:
        return must
    if other is ANY_TEXT:
        return either(must, {"type": "regex", "pattern": r"(?s:[^{\s].*)"})
    return either(*(schema(_whole(name, one)) for name, one in calls.items()), other)


def _whole(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A call as a schema, so that it may stand beside others: texts that begin alike cannot. References lead to
    definitions, which stay at the top."""
    parameters = moved(parameters, "#/properties/parameters")
    definitions: dict[str, Any] = {key: parameters.pop(key) for key in DEFINITIONS if key in parameters}
    return {
        **definitions,
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
