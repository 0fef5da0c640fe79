"""Structural tags: text with structures in it, in the two forms that servers of this field take. Pure.

The older form: {"triggers": [...], "structures": [{"begin", "schema", "end"}]}. The newer: {"format": F}, F an object
of a `type` of `_FORMATS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..contracts.errors import InvalidRequest
from .lark import ANY_TEXT, Lark
from .schemas import check_pattern, check_schema

MAX_DEPTH = 32


def structural_rule(field: str, document: Any, lark: Lark) -> str:
    """Raises InvalidRequest naming `field` and the place in it."""
    if not isinstance(document, dict):
        raise InvalidRequest(field, document, "an object with format, or with triggers and structures")
    if "format" in document:
        return _format(f"{field}.format", document["format"], lark, MAX_DEPTH)
    tags = []
    for at, one in enumerate(_list(f"{field}.structures", document.get("structures"))):
        path = f"{field}.structures[{at}]"
        schema = _member(path, one, "schema", (dict, bool), "a JSON schema")
        begin, end = (_member(path, one, name, str, "a text") for name in ("begin", "end"))
        tags.append({"begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end})
    made = {"triggers": document.get("triggers"), "tags": tags}
    return _triggered(field, made, lark, MAX_DEPTH)


def _format(field: str, one: Any, lark: Lark, depth: int) -> str:
    kind = one.get("type") if isinstance(one, dict) else None
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise InvalidRequest(field, one, f"an object of type {', '.join(_FORMATS)}")
    if not depth:
        raise InvalidRequest(field, one, f"at most {MAX_DEPTH} levels")
    return _FORMATS[kind](field, one, lark, depth - 1)


def _const(field: str, one: Mapping[str, Any], lark: Lark, depth: int) -> str:
    return lark.literal(_member(field, one, "value", str, "a text"))


def _schema(field: str, one: Mapping[str, Any], lark: Lark, depth: int) -> str:
    if one.get("style", "json") != "json":
        raise InvalidRequest(f"{field}.style", one["style"], "json")
    schema = _member(field, one, "json_schema", (dict, bool), "a JSON schema")
    check_schema(f"{field}.json_schema", schema)
    return lark.json(schema)


def _regex(field: str, one: Mapping[str, Any], lark: Lark, depth: int) -> str:
    pattern = _member(field, one, "pattern", str, "a regular expression")
    check_pattern(f"{field}.pattern", pattern)
    return lark.regex(pattern)


def _grammar(field: str, one: Mapping[str, Any], lark: Lark, depth: int) -> str:
    return lark.lark(_member(field, one, "grammar", str, "a grammar in Lark"))


def _any_text(field: str, one: Mapping[str, Any], lark: Lark, depth: int) -> str:
    return lark.rule(ANY_TEXT)


def _sequence(field: str, one: Mapping[str, Any], lark: Lark, depth: int) -> str:
    return lark.rule(" ".join(_elements(field, one, lark, depth)))


def _or(field: str, one: Mapping[str, Any], lark: Lark, depth: int) -> str:
    return lark.rule(" | ".join(_elements(field, one, lark, depth)))


def _elements(field: str, one: Mapping[str, Any], lark: Lark, depth: int) -> list[str]:
    elements = _list(f"{field}.elements", one.get("elements"))
    return [_format(f"{field}.elements[{at}]", inner, lark, depth) for at, inner in enumerate(elements)]


def _tag(field: str, one: Mapping[str, Any], lark: Lark, depth: int, begun: str = "") -> str:
    """`begun`: what of its beginning stands there already."""
    begin, end = (_member(field, one, name, str, "a text") for name in ("begin", "end"))
    content = _member(field, one, "content", dict, "an object with type")
    head = lark.literal(begin[len(begun) :]) if begin[len(begun) :] else ""
    if content.get("type") == "any_text" and end:
        return lark.rule(f"{head} {lark.text_until(end)}")
    inside = _format(f"{field}.content", content, lark, depth)
    return lark.rule(f"{head} {inside} {lark.literal(end) if end else ''}")


def _triggered(field: str, one: Mapping[str, Any], lark: Lark, depth: int) -> str:
    triggers = _list(f"{field}.triggers", one.get("triggers"))
    of_trigger: dict[str, list[str]] = {}
    for at, tag in enumerate(_list(f"{field}.tags", one.get("tags"))):
        path = f"{field}.tags[{at}]"
        begin = _member(path, tag, "begin", str, "a text")
        trigger = next((word for word in triggers if isinstance(word, str) and word and begin.startswith(word)), None)
        if trigger is None:
            raise InvalidRequest(f"{path}.begin", begin, f"a text that begins with one of the triggers, {triggers}")
        of_trigger.setdefault(trigger, []).append(_tag(path, tag, lark, depth, trigger))
    each = lark.rule(" | ".join(f"{lark.text_until(word)} ({' | '.join(tags)})" for word, tags in of_trigger.items()))
    at_least_one, only_one = one.get("at_least_one", False), one.get("stop_after_first", False)
    if only_one:
        return each if at_least_one else lark.rule(f"{each} | {ANY_TEXT}")
    return lark.rule(f"{each}{'+' if at_least_one else '*'} {ANY_TEXT}")


def _separated(field: str, one: Mapping[str, Any], lark: Lark, depth: int) -> str:
    tags = _list(f"{field}.tags", one.get("tags"))
    each = lark.rule(" | ".join(_tag(f"{field}.tags[{at}]", tag, lark, depth) for at, tag in enumerate(tags)))
    separator = lark.literal(_member(field, one, "separator", str, "a text"))
    more = "" if one.get("stop_after_first", False) else f" ({separator} {each})*"
    whole = lark.rule(f"{each}{more}")
    return whole if one.get("at_least_one", False) else f"{whole}?"


_FORMATS: dict[str, Callable[[str, Mapping[str, Any], Lark, int], str]] = {
    "const_string": _const,
    "json_schema": _schema,
    "regex": _regex,
    "grammar": _grammar,
    "any_text": _any_text,
    "sequence": _sequence,
    "or": _or,
    "tag": _tag,
    "triggered_tags": _triggered,
    "tags_with_separator": _separated,
}


def _member(field: str, one: Any, name: str, kind: Any, allowed: str) -> Any:
    value = one.get(name) if isinstance(one, dict) else None
    if not isinstance(value, kind):
        raise InvalidRequest(f"{field}.{name}", value, allowed)
    return value


def _list(field: str, value: Any) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(field, value, "a list of at least one")
    return value
