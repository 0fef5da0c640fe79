"""What a request says about the structure of its answer, in the words of vLLM and of TensorRT-LLM -> one grammar.

Pure: the shape alone; whether a grammar can be compiled is found out where the tokenizer is. Texts stay texts: to parse
a schema is that process's too.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from ...contracts.errors import InvalidRequest
from ...contracts.grammars import MAX_BYTES, Grammar, Kind, Thinking
from . import client_json

# Of `structured_outputs`: one of these.
KINDS: Mapping[str, Kind] = {
    "json": Kind.JSON_SCHEMA,
    "json_object": Kind.JSON_OBJECT,
    "regex": Kind.REGEX,
    "choice": Kind.CHOICE,
    "grammar": Kind.GRAMMAR,
    "structural_tag": Kind.STRUCTURAL_TAG,
}
THINKING = "thinking"
STRUCTURES = "structured_outputs"
OLDER = "guided_decoding"  # vLLM's name of it before
GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar")}
GUIDE_NAMES = (STRUCTURES, OLDER, *GUIDED)
GUIDE_TYPES: Mapping[str, Kind] = {
    "json": Kind.JSON_OBJECT,
    "json_schema": Kind.JSON_SCHEMA,
    "regex": Kind.REGEX,
    "ebnf_grammar": Kind.GRAMMAR,
    "structural_tag": Kind.STRUCTURAL_TAG,
}
GUIDE_TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
# Settings of other servers' engines that say nothing here with these values.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "disable_fallback": (True, False),
    "disable_any_whitespace": (False,),
    "disable_additional_properties": (False,),
    "whitespace_pattern": (),
    "backend": (),
}


class Guide(NamedTuple):
    """`field`: what the client wrote, which errors name."""

    field: str
    grammar: Grammar


def pack_guide(guide: Guide) -> str:
    """On its way from the scheduler to the tokenizer."""
    return json.dumps([guide.field, guide.grammar.to_bytes().decode()])


def unpack_guide(text: str) -> Guide:
    """Raises InvalidRequest: any client can call the tokenizer."""
    try:
        field, grammar = json.loads(text)
        return Guide(str(field), Grammar.from_bytes(grammar.encode()))
    except (ValueError, TypeError, AttributeError) as error:
        raise InvalidRequest("grammar", text, "what the scheduler sends") from error


def read_guide(name: str, value: object) -> Guide | None:
    """Of a key of `sampling_parameters` or a request parameter, in which objects and lists may be JSON text. None for
    nothing. Raises InvalidRequest."""
    if name in GUIDED:
        return Guide(name, _grammar(name, KINDS[GUIDED[name]], value))
    allowed = f"an object with one of {', '.join(KINDS)}"
    if isinstance(value, str):
        value = client_json.parse(name, value, MAX_BYTES, allowed)
    if not isinstance(value, dict):
        raise InvalidRequest(name, value, allowed)
    given = {key: one for key, one in value.items() if one is not None and (one is not False or key == "json")}
    thinking = _thinking(f"{name}.{THINKING}", given.pop(THINKING, None))
    for key, neutral in _NEUTRAL.items():
        if key in given and given.pop(key) not in neutral:
            raise InvalidRequest(f"{name}.{key}", value[key], "nothing: it is not offered")
    if not given and thinking is None:
        return None
    kind = next(iter(given), "")
    if len(given) != 1 or kind not in KINDS:
        raise InvalidRequest(name, sorted(given), allowed)
    return Guide(f"{name}.{kind}", _grammar(f"{name}.{kind}", KINDS[kind], given[kind], thinking))


def read_typed_guide(kind: str | None, guide: str | None) -> Guide | None:
    """Of TensorRT-LLM's two tensors. Raises InvalidRequest."""
    if not kind:
        if guide:
            raise InvalidRequest(GUIDE, guide, f"nothing without {GUIDE_TYPE}")
        return None
    if kind not in GUIDE_TYPES:
        raise InvalidRequest(GUIDE_TYPE, kind, ", ".join(GUIDE_TYPES))
    if GUIDE_TYPES[kind] is Kind.JSON_OBJECT:
        if guide:
            raise InvalidRequest(GUIDE, guide, f"nothing beside the type {kind}")
        return Guide(GUIDE_TYPE, Grammar(Kind.JSON_OBJECT))
    if not guide:
        raise InvalidRequest(GUIDE, "nothing", f"the text of a guide of type {kind}")
    return Guide(GUIDE, Grammar(GUIDE_TYPES[kind], guide))


def leaves_choices(grammar: Grammar, bad_words: Collection[str]) -> bool:
    """Whether some choice holds none of these words; of what is no list of choices nothing is said."""
    if grammar.kind is not Kind.CHOICE:
        return True
    try:
        choices = json.loads(grammar.text)
    except (ValueError, RecursionError):
        return True  # refused by name where it is tried
    texts = [one for one in choices if isinstance(one, str)] if isinstance(choices, list) else []
    return not texts or any(not any(word in text for word in bad_words) for text in texts)


def _grammar(field: str, kind: Kind, value: object, thinking: Thinking | None = None) -> Grammar:
    if kind is Kind.JSON_OBJECT:
        if value is not True:
            raise InvalidRequest(field, value, "true or false")
        return Grammar(kind, "", thinking)
    if isinstance(value, str) and (value or kind is not Kind.REGEX):
        return Grammar(kind, value, thinking)
    allowed, kinds = {
        Kind.JSON_SCHEMA: ("a JSON schema, as an object or as text", (dict, bool)),
        Kind.REGEX: ("a regular expression of at least one character", ()),
        Kind.CHOICE: ("a list of texts", (list,)),
        Kind.GRAMMAR: ("a grammar, as text in Lark or GBNF", ()),
        Kind.STRUCTURAL_TAG: ("a structural tag, as an object or as text", (dict,)),
    }[kind]
    if not isinstance(value, kinds):
        raise InvalidRequest(field, value, allowed)
    return Grammar(kind, json.dumps(value, separators=(",", ":")), thinking)


def _thinking(field: str, value: object) -> Thinking | None:
    if value is None:
        return None
    allowed = 'an object such as {"begin": "<think>", "end": "</think>", "open": false}'
    if not isinstance(value, dict) or not {"begin", "end"} <= value.keys() <= {"begin", "end", "open"}:
        raise InvalidRequest(field, value, allowed)
    begin, end, is_open = value["begin"], value["end"], value.get("open", False)
    if not (isinstance(begin, str) and isinstance(end, str) and begin and end and isinstance(is_open, bool)):
        raise InvalidRequest(field, value, allowed)
    return Thinking(begin, end, is_open)
