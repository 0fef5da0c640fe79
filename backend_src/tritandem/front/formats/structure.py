"""Structures of answers as the scheduler takes them (`structural_tag`), of which formats make theirs. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Part = dict[str, Any]
Calls = Mapping[str, Any]  # JSON schema of the arguments by the name of a function
ANY_TEXT: Part = {"type": "any_text"}


def schema(given: Any) -> Part:
    return {"type": "json_schema", "json_schema": given}


def text(value: str) -> Part:
    return {"type": "const_string", "value": value}


def tag(begin: str, content: Part, end: str) -> Part:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Part) -> Part:
    return {"type": "sequence", "elements": list(elements)}


def either(*elements: Part) -> Part:
    return {"type": "or", "elements": list(elements)}


def tags(listed: Sequence[Part], separator: str, several: bool) -> Part:
    """At least one of them."""
    return {
        "type": "tags_with_separator",
        "tags": list(listed),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }


def in_text(trigger: str, listed: Sequence[Part], several: bool) -> Part:
    """Any text, in which what begins with the trigger is one of them."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": list(listed),
        "at_least_one": False,
        "stop_after_first": not several,
    }


def json_calls(calls: Calls, arguments: str, begin: str = "", end: str = "") -> list[Part]:
    """Of each function the object {"name": ..., `arguments`: ...}, between two marks."""
    return [
        tag(f'{begin}{{"name": {json.dumps(name)}, "{arguments}": ', schema(one), f"}}{end}")
        for name, one in calls.items()
    ]
