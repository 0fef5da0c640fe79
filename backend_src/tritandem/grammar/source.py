"""From a grammar as clients write it to the one text that is compiled. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from ..contracts.errors import InvalidRequest
from ..contracts.grammars import Grammar, Kind, Thinking
from .lark import Lark
from .schemas import check_characters, check_pattern, check_schema
from .structural import structural_rule

ANY_OBJECT = {"type": "object"}


def source_of(grammar: Grammar, special_ids: Mapping[str, int], field: str) -> str:
    """Raises InvalidRequest naming `field` for what is no grammar of its kind."""
    for text in (grammar.text, *((grammar.thinking.begin, grammar.thinking.end) if grammar.thinking else ())):
        check_characters(field, text)
    lark = Lark(special_ids)
    try:
        body = _body(grammar, lark, field)
    except RecursionError as error:
        raise InvalidRequest(field, grammar.text, "fewer levels") from error
    if grammar.thinking is not None:
        body = f"{_thoughts(grammar.thinking, lark)} {body}"
    return lark.source(body)


def _body(grammar: Grammar, lark: Lark, field: str) -> str:
    kind, text = grammar.kind, grammar.text
    if kind is Kind.JSON_OBJECT:
        return lark.json(ANY_OBJECT)
    if kind is Kind.JSON_SCHEMA:
        schema = _parsed(field, text, "a JSON schema")
        check_schema(field, schema)
        return lark.json(schema)
    if kind is Kind.REGEX:
        check_pattern(field, text)
        return lark.regex(text)
    if kind is Kind.CHOICE:
        return lark.rule(" | ".join(lark.literal(choice) for choice in read_choices(field, text)))
    if kind is Kind.GRAMMAR:
        return lark.lark(_as_lark(field, text))
    return structural_rule(field, _parsed(field, text, "a structural tag, a JSON object"), lark)


def read_choices(field: str, text: str) -> list[str]:
    """Raises InvalidRequest."""
    allowed = "a list of at least one text, none of them empty"
    choices = _parsed(field, text, allowed)
    if not isinstance(choices, list) or not choices or not all(isinstance(one, str) and one for one in choices):
        raise InvalidRequest(field, choices, allowed)
    return choices


def _thoughts(thinking: Thinking, lark: Lark) -> str:
    rest = f"{lark.text_until(thinking.end)} /[ \\n]{{1,4}}/?"
    return lark.rule(rest) if thinking.is_open else lark.rule(f"{lark.literal(thinking.begin)} {rest}") + "?"


def _as_lark(field: str, text: str) -> str:
    """Lark as it is; what has `::=` is GBNF."""
    try:
        return str(any_to_lark(text))
    except RecursionError:
        raise
    except Exception as error:  # the conversion raises whatever its parser raises
        raise InvalidRequest(field, text, f"a grammar in Lark or GBNF: {error}") from error


def _parsed(field: str, text: str, allowed: str) -> Any:
    try:
        value = json.loads(text)
        check_characters(field, json.dumps(value, ensure_ascii=False))  # named by escapes
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(field, text, f"{allowed}: malformed JSON ({error})") from error
    return value
