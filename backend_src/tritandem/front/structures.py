"""What an answer must be, by all that a request says: its format, its tools, how the model thinks and calls. Pure.

From here on it is one structure in the scheduler's words (`structured_outputs`), and errors about it name the field
that the client wrote.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ..contracts.grammars import Grammar, Kind
from ..triton_io.request.guides import KINDS, STRUCTURES, THINKING, Guide
from .ask import Ask
from .errors import invalid
from .fields import CHAT
from .formats.choose import Formats
from .formats.structure import ANY_TEXT, Part, either, schema, text

ANY_ARGUMENTS = {"type": "object"}
TOOLS = "tools"
_KEYS = {kind: key for key, kind in KINDS.items()}


def with_structure(ask: Ask, formats: Formats) -> Ask:
    """The request, its structure among its options. Raises ApiError."""
    made = _structure(ask, formats)
    if made is None:
        return ask
    said, field = made
    if ask.door == CHAT and formats.thinks and THINKING not in said:
        said[THINKING] = formats.thinks
    options = dict(ask.options)
    options["sampling_parameters"] = {**options.get("sampling_parameters", {}), STRUCTURES: said}
    key = next(key for key in said if key != THINKING)
    return dataclasses.replace(ask, options=options, names={**ask.names, f"{STRUCTURES}.{key}": field})


def with_marks(ask: Ask, formats: Formats) -> Ask:
    """The request, which asks for the control tokens by which harmony tells an answer's parts apart."""
    if ask.door != CHAT or not formats.harmony:
        return ask
    sampling = {**ask.options.get("sampling_parameters", {}), "skip_special_tokens": False}
    return dataclasses.replace(ask, options={**ask.options, "sampling_parameters": sampling})


def _structure(ask: Ask, formats: Formats) -> tuple[dict[str, Any], str] | None:
    guide, tools = ask.guide, ask.options.get("tools", [])
    if tools and (guide or ask.must_call or any(tool["function"].get("strict") is True for tool in tools)):
        calls = {tool["function"]["name"]: _arguments(tool["function"], ask) for tool in tools}
        if ask.must_call:
            calls, other = {name: calls[name] for name in ask.must_call}, None
        else:
            other = ANY_TEXT if guide is None else _part(guide)
        return {"structural_tag": {"format": formats.structure(calls, ask.parallel_calls, other)}}, TOOLS
    if guide is None:
        return None
    if ask.door == CHAT and formats.harmony:
        return {"structural_tag": {"format": formats.structure({}, False, _part(guide))}}, guide.field
    grammar = guide.grammar
    said: dict[str, Any] = {_KEYS[grammar.kind]: True if grammar.kind is Kind.JSON_OBJECT else grammar.text}
    if (own := grammar.thinking) is not None:
        said[THINKING] = {"begin": own.begin, "end": own.end, "open": own.is_open}
    return said, guide.field


def _arguments(function: dict[str, Any], ask: Ask) -> dict[str, Any]:
    """Of a function that need not be strict any object, unless it must be called."""
    if not ask.must_call and function.get("strict") is not True:
        return ANY_ARGUMENTS
    return {**ANY_ARGUMENTS, **(function.get("parameters") or {})}


def _part(guide: Guide) -> Part:
    """A structure as a part of another. Raises ApiError."""
    grammar = guide.grammar
    if grammar.kind is Kind.JSON_OBJECT:
        return schema(ANY_ARGUMENTS)
    if grammar.kind is Kind.REGEX:
        return {"type": "regex", "pattern": grammar.text}
    if grammar.kind is Kind.GRAMMAR:
        return {"type": "grammar", "grammar": grammar.text}
    part = _of_json(grammar)
    if part is None:
        raise invalid(guide.field, grammar.text, "one that can stand beside tools: JSON of its kind")
    return part


def _of_json(grammar: Grammar) -> Part | None:
    try:
        value = json.loads(grammar.text)
    except (ValueError, RecursionError):
        return None
    if grammar.kind is Kind.JSON_SCHEMA:
        return schema(value)
    if grammar.kind is Kind.CHOICE:
        listed = isinstance(value, list) and value and all(isinstance(one, str) for one in value)
        return either(*map(text, value)) if listed else None
    part = value.get("format") if isinstance(value, dict) else None
    return part if isinstance(part, dict) else None
