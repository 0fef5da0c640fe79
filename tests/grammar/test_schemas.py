"""What of JSON Schema is honoured: instances are taken as `jsonschema` judges them, and whatever is drawn is valid."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from tritandem.contracts.errors import InvalidRequest
from tritandem.grammar import Kind

from .spelled import END, allowed, matcher, takes

Case = tuple[Any, list[Any], list[Any]]  # schema, instances that are valid, and that are not


def an_object(properties: dict[str, Any], *required: str, **more: Any) -> dict[str, Any]:
    closed = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {**closed, **more}


NODE = an_object(
    {"value": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}, "value"
)
CASES: dict[str, Case] = {
    "types": (
        an_object({"a": {"type": ["integer", "null"]}, "b": {"type": "boolean"}}, "a", "b"),
        [{"a": 1, "b": True}, {"a": None, "b": False}],
        [{"a": 1.5, "b": True}, {"a": 1}, {"a": 1, "b": 0}, [], {"a": 1, "b": True, "c": 1}],
    ),
    "optional properties": (
        an_object({"a": {"type": "integer"}, "b": {"type": "integer"}, "c": {"type": "integer"}}, "b"),
        [{"b": 1}, {"a": 0, "b": 1}, {"a": 0, "b": 1, "c": 2}],
        [{"a": 1}, {"a": 1, "c": 1}],
    ),
    "additional properties": (
        {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": {"type": "integer"}},
        [{}, {"a": 1}, {"a": 1, "z": 7}, {"z": 7}],
        [{"a": 2}, {"z": "x"}],
    ),
    "pattern properties": (
        {"type": "object", "patternProperties": {"^n_": {"type": "integer"}}, "additionalProperties": False},
        [{}, {"n_a": 1}, {"n_": 1, "n_b": 2}],
        [{"a": 1}, {"n_a": "x"}],
    ),
    "numbers of properties": (
        an_object({}, additionalProperties={"type": "integer"}, minProperties=1, maxProperties=2),
        [{"a": 1}, {"a": 1, "b": 2}],
        [{}, {"a": 1, "b": 2, "c": 3}],
    ),
    "bounds of integers": (
        {"type": "integer", "minimum": -5, "exclusiveMaximum": 12},
        [-5, 0, 11],
        [-6, 12, 1.5],
    ),
    "bounds of numbers": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
        [0.1, 2.5, 1],
        [0, 2.6, -1],
    ),
    "multiples": ({"type": "integer", "multipleOf": 7, "minimum": 0}, [0, 7, 700], [1, 701]),
    "lengths of texts": ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "aßc", '\\"'], ["a", "abcd"]),
    "patterns": ({"type": "string", "pattern": "^[a-z]+\\d{2}$"}, ["ab12"], ["ab1", "12", "ab12x"]),
    "parts of patterns": ({"type": "string", "pattern": "b+"}, ["abba"], ["aa"]),
    "dates": (
        an_object({"at": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "uuid"}}, "at"),
        [{"at": "2026-12-01"}, {"at": "2026-12-01", "id": "123e4567-e89b-12d3-a456-426614174000"}],
        [{"at": "01.12.2026"}, {"at": "2026-13-01"}, {"at": "2026-12-01", "id": "x"}],
    ),
    "enumerations": ({"enum": ["a", 1, None, {"b": [True]}]}, ["a", 1, None, {"b": [True]}], ["b", 2, {"b": []}]),
    "constants": ({"const": {"a": "é\n"}}, [{"a": "é\n"}], [{"a": "e"}]),
    "lists": (
        {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 3},
        [[1], [1, 2, 3]],
        [[], [1, 2, 3, 4], ["x"]],
    ),
    "tuples": (
        {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False, "minItems": 2},
        [[1, "a"]],
        [[1], ["a", 1], [1, "a", 2]],
    ),
    "alternatives": (
        {"anyOf": [{"type": "integer"}, an_object({"a": {"type": "string"}}, "a")]},
        [3, {"a": "x"}],
        ["x", {"a": 3}],
    ),
    "exclusive alternatives": (
        {
            "oneOf": [
                an_object({"kind": {"const": "a"}, "x": {"type": "integer"}}, "kind", "x"),
                an_object({"kind": {"const": "b"}}, "kind"),
            ]
        },
        [{"kind": "a", "x": 1}, {"kind": "b"}],
        [{"kind": "a"}, {"kind": "c"}],
    ),
    "all of several": (
        {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
        [3, 5],
        [2, 6, "x"],
    ),
    "references": (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        [{"value": 1}, {"value": 1, "next": {"value": 2, "next": None}}],
        [{"next": None}, {"value": 1, "next": {"value": "x"}}],
    ),
}
REFUSED = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "string"}, "then": {"minLength": 1}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "contains": {"type": "array", "contains": {"type": "integer"}},
    "propertyNames": {"type": "object", "propertyNames": {"pattern": "^a"}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#node"},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "nullable": {"type": "string", "nullable": True},
    "divisibleBy": {"type": "integer", "divisibleBy": 2},
    "extends": {"type": "object", "extends": {"required": ["a"]}},
    "disallow": {"disallow": "string"},
}


def judged(schema: Any, instance: Any) -> bool:
    validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
    return bool(validator.is_valid(instance))


@pytest.mark.parametrize("name", CASES)
def test_instances_are_taken_as_the_standard_judges_them(name: str) -> None:
    schema, valid, invalid = CASES[name]
    at = matcher(Kind.JSON_SCHEMA, schema)
    for instance, is_valid in (*((one, True) for one in valid), *((one, False) for one in invalid)):
        assert judged(schema, instance) == is_valid
        for separators in ((", ", ": "), (",", ":")):
            text = json.dumps(instance, ensure_ascii=False, separators=separators)
            assert takes(at, text) == is_valid, text


@pytest.mark.parametrize("name", CASES)
def test_whatever_is_drawn_is_valid(name: str) -> None:
    schema = CASES[name][0]
    for seed in range(4):
        at, random, made = matcher(Kind.JSON_SCHEMA, schema), np.random.default_rng(seed), bytearray()
        while True:
            ids = sorted(allowed(at))
            # Where it may end it does so half of the time, as do texts, lists and numbers, or no walk would end.
            ends = [one for one in (END, *b'"]}') if one in ids]
            token = int(random.choice(ends if ends and random.random() < 0.5 else ids))
            if token == END:
                break
            assert at.accept(token)
            made.append(token)
        assert judged(schema, json.loads(made)), made


@pytest.mark.parametrize("word", REFUSED)
def test_a_word_that_cannot_be_honoured_is_refused_by_name(word: str) -> None:
    with pytest.raises(InvalidRequest, match=word.replace("$", "\\$")):
        matcher(Kind.JSON_SCHEMA, {"anyOf": [REFUSED[word], {"type": "null"}]})


def test_words_that_only_describe_are_passed_over() -> None:
    said = {
        "title": "t",
        "description": "d",
        "default": 3,
        "examples": [4],
        "deprecated": True,
        "x-of-mine": {"not": {}},
    }
    said |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "readOnly": True, "$comment": "c"}
    assert takes(matcher(Kind.JSON_SCHEMA, {"type": "integer", **said}), "5")
    named = {"type": "object", "properties": {"nullable": {"type": "integer"}}, "required": ["nullable"]}
    assert takes(matcher(Kind.JSON_SCHEMA, named), '{"nullable": 1}')


@pytest.mark.parametrize(
    ("kind", "given", "path"),
    [
        (Kind.REGEX, "abc\\", "structured_outputs"),
        (Kind.REGEX, "a\\\\\\", "structured_outputs"),
        (Kind.JSON_SCHEMA, {"type": "string", "pattern": "a\\"}, "structured_outputs.pattern"),
        (Kind.JSON_SCHEMA, {"patternProperties": {"a\\": {}}}, "structured_outputs.patternProperties"),
        (Kind.STRUCTURAL_TAG, {"format": {"type": "regex", "pattern": "a\\"}}, "structured_outputs.format.pattern"),
    ],
)
def test_an_expression_that_ends_in_a_lone_backslash_is_refused_by_name(kind: Kind, given: Any, path: str) -> None:
    with pytest.raises(InvalidRequest, match="lone backslash") as refused:
        matcher(kind, given)
    assert refused.value.field_name == path
    assert takes(matcher(Kind.REGEX, "a\\\\"), "a\\")


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (Kind.REGEX, "a\ud800b"),
        (Kind.GRAMMAR, 'start: "\udfff"'),
        (Kind.CHOICE, ["a", "\ud800"]),
        (Kind.JSON_SCHEMA, {"const": "\ud800"}),
        (Kind.JSON_SCHEMA, {"type": "object", "properties": {"\ud800": {}}}),
        (Kind.STRUCTURAL_TAG, {"format": {"type": "const_string", "value": "\ud800"}}),
    ],
)
def test_half_a_character_is_refused_for_what_it_is(kind: Kind, given: Any) -> None:
    with pytest.raises(InvalidRequest, match="half of a surrogate pair"):
        matcher(kind, given)
    assert takes(matcher(Kind.CHOICE, ["\U0001f600"]), "\U0001f600")  # both halves, as JSON escapes them
