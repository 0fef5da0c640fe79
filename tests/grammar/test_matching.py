"""Answers are matched token by token, and end only where they may."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tritandem.contracts.errors import ConfigError, InvalidRequest
from tritandem.contracts.grammars import MAX_BYTES
from tritandem.grammar import Grammar, Kind, Limits, Matcher, Thinking, Vocabulary, compile_grammar
from tritandem.grammar.compiled import MaskPool

from .spelled import CALL, END, ROWS, allowed, byte_vocabulary, matcher, takes

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        (Kind.JSON_OBJECT, "", ['{"a": [1, null]}', "{}"], ["[]", "1", ""]),
        (Kind.JSON_SCHEMA, PERSON, ['{"name":"é","age":3}'], ['{"age":3,"name":"x"}', '{"name":"x"}', "{}"]),
        (Kind.JSON_SCHEMA, True, ["1", '"x"', "[]"], ["", "x"]),
        (Kind.REGEX, r"[a-c]+\d", ["abc1", "a9"], ["abc", "d1", "a12"]),
        (Kind.REGEX, r"^[a-c]+\$$", ["abc$"], ["abc", "$"]),
        (Kind.CHOICE, ["red", "redder", "größe"], ["red", "redder", "größe"], ["re", "green", "", "redde"]),
        (Kind.GRAMMAR, 'start: "a" b+\nb: /[0-9]/ | "x"', ["a1x", "ax"], ["a", "b"]),
        (Kind.GRAMMAR, 'root ::= "a" b+\nb ::= [0-9] | "x"', ["a1x", "ax"], ["a", "b"]),
    ],
)
def test_what_a_grammar_says_is_taken_and_nothing_else(kind: Kind, text: Any, good: list[str], bad: list[str]) -> None:
    at = matcher(kind, text)
    assert [text for text in good if not takes(at, text)] == []
    assert [text for text in bad if takes(at, text)] == []


def test_a_character_of_several_bytes_may_be_split_across_tokens() -> None:
    at = matcher(Kind.CHOICE, ["é"])
    assert allowed(at) == {0xC3}
    assert at.accept(0xC3)
    assert not at.may_end()
    assert allowed(at) == {0xA9}


def test_the_end_is_allowed_only_where_the_answer_may_end_and_padding_never() -> None:
    at = matcher(Kind.REGEX, r"(?s:.)*")
    assert allowed(at) >= {END, ord("a")}
    assert CALL not in allowed(at)
    assert max(allowed(at)) == END < ROWS
    over = matcher(Kind.CHOICE, ["a"])
    assert over.accept(ord("a"))
    assert (over.may_end(), over.is_over(), allowed(over)) == (True, True, {END})


def test_a_refused_token_changes_nothing() -> None:
    at = matcher(Kind.CHOICE, ["ab"])
    assert not at.accept(ord("x"))
    assert not at.accept(END)
    assert at.accept(ord("a"))
    assert at.accept(ord("b"))
    assert at.may_end()


def test_tokens_can_be_taken_back_and_copies_go_their_own_way() -> None:
    at = matcher(Kind.CHOICE, ["abc", "abd"])
    assert at.forced_tokens() == [ord("a"), ord("b")]
    assert all(at.accept(ord(char)) for char in "abc")
    other = at.copy()
    at.rollback(1)
    assert allowed(at) == {ord("c"), ord("d")}
    assert other.may_end()
    with pytest.raises(ValueError, match="3 tokens"):
        at.rollback(3)


def test_blanks_between_the_parts_of_json_are_bounded() -> None:
    at = matcher(Kind.JSON_SCHEMA, PERSON)
    assert takes(at, json.dumps({"name": "x", "age": 1}, indent=4))
    assert takes(at, json.dumps({"name": "x", "age": 1}, separators=(",", ":")))
    assert not takes(at, '{"name":   "x", "age": 1}')
    assert not takes(at, '{"name":\n\n"x", "age": 1}')


def test_a_schema_cannot_loosen_how_it_is_read() -> None:
    at = matcher(Kind.JSON_SCHEMA, {**PERSON, "x-guidance": {"whitespace_pattern": "[ ]+", "lenient": True}})
    assert not takes(at, '{"name":   "x", "age": 1}')


@pytest.mark.parametrize(
    ("is_open", "good", "bad"),
    [
        (False, ["<think>{1}</think>\n\n[1]", "[1]"], ["{1}</think>[1]", "<think>[1]"]),
        (True, ["{1}</think>\n\n[1]", "</think>[1]"], ["[1]", "<think>[1]"]),
    ],
)
def test_a_structure_begins_after_the_thoughts(is_open: bool, good: list[str], bad: list[str]) -> None:
    at = matcher(Kind.CHOICE, ["[1]"], thinking=Thinking("<think>", "</think>", is_open))
    assert [text for text in good if not takes(at, text)] == []
    assert [text for text in bad if takes(at, text)] == []


def test_a_special_token_in_a_text_is_that_token() -> None:
    at = matcher(Kind.CHOICE, ["[CALL]x"])
    assert allowed(at) == {CALL}
    assert at.accept(CALL)
    assert takes(at, "x")


def test_masks_of_many_rows_are_made_at_once() -> None:
    one, other = matcher(Kind.CHOICE, ["a"]), matcher(Kind.CHOICE, ["b"])
    masks = np.full((3, byte_vocabulary().words), 7, np.int32)
    MaskPool(2).fill([(one, 2), (other, 0)], masks)
    alone = np.zeros((2, byte_vocabulary().words), np.int32)
    other.mask_into(alone[0])
    one.mask_into(alone[1])
    assert (masks[[0, 2]] == alone).all()
    assert (masks[1] == 7).all()


@pytest.mark.parametrize(
    ("kind", "text", "place", "why"),
    [
        (Kind.JSON_SCHEMA, "{", "here", "malformed JSON"),
        (Kind.JSON_SCHEMA, "3", "here", "an object, true or false"),
        (Kind.JSON_SCHEMA, {"not": {"type": "string"}}, "here", "not"),
        (Kind.JSON_SCHEMA, {"properties": {"a": {"nullable": True}}}, "here.properties.a.nullable", "no such word"),
        (Kind.JSON_SCHEMA, {"$ref": "https://example.com/x"}, "here", "https://example.com/x"),
        (Kind.JSON_SCHEMA, {"$ref": "#/$defs/x"}, "here", "/$defs/x"),
        (Kind.JSON_SCHEMA, {"type": "string", "format": "stardate"}, "here", "stardate"),
        (Kind.REGEX, "(", "here", "regex"),
        (Kind.REGEX, "a(?=b)", "here", "look-around"),
        (Kind.CHOICE, "[]", "here", "at least one text"),
        (Kind.CHOICE, [""], "here", "none of them empty"),
        (Kind.GRAMMAR, "start: nothing", "here", "nothing"),
        (Kind.GRAMMAR, 'root ::= "a', "here", "GBNF"),
        (Kind.GRAMMAR, "x" * MAX_BYTES, "here", "at most"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(kind: Kind, text: Any, place: str, why: str) -> None:
    made = text if isinstance(text, str) else json.dumps(text)
    with pytest.raises(InvalidRequest) as refused:
        compile_grammar(byte_vocabulary(), Grammar(kind, made), field="here")
    assert refused.value.field_name == place
    assert why in str(refused.value)


def test_limits_are_kept() -> None:
    wide = Grammar(Kind.CHOICE, json.dumps([f"choice {n}" for n in range(3000)]))
    assert isinstance(compile_grammar(byte_vocabulary(), wide), Matcher)
    with pytest.raises(InvalidRequest, match="too big"):
        compile_grammar(byte_vocabulary(), wide, Limits(compile_fuel=1000))


def test_a_grammar_travels_as_bytes() -> None:
    grammar = Grammar(Kind.REGEX, "é\ud800", Thinking("<t>", "</t>", True))
    assert Grammar.from_bytes(grammar.to_bytes()) == grammar
    others = [Grammar(Kind.REGEX, "é"), Grammar(Kind.GRAMMAR, "é\ud800"), Grammar(Kind.REGEX, "é\ud800")]
    assert len({one.key for one in (grammar, *others)}) == 4


def test_a_tokenizer_whose_tokens_have_no_known_bytes_is_refused() -> None:
    spec = json.dumps({"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}, "added_tokens": []})
    with pytest.raises(ConfigError, match="WordPiece"):
        Vocabulary(spec, 1, [0])
