"""Structural tags: text that holds structures, in both forms that clients send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tritandem.contracts.errors import InvalidRequest
from tritandem.grammar import Kind

from .spelled import CALL, allowed, matcher, takes

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
OLDER = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<f=point>", "schema": POINT, "end": "</f>"},
        {"begin": "<f=any>", "schema": True, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def form(kind: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, **more}


def word(text: str) -> dict[str, Any]:
    return form("const_string", value=text)


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return form("tag", begin=begin, content=content, end=end)


A, B = (tag(f"<{name}>", form("regex", pattern="[0-9]+"), f"</{name}>") for name in "ab")
CASES: dict[str, tuple[Any, list[str], list[str]]] = {
    "the older form": (
        OLDER,
        ["", "Just text <b>.", 'It is <f=point>{"x": 1}</f>', '<f=any>[1]</f> and <f=point>{"x":2}</f>!'],
        ['<f=point>{"x": "a"}</f>', "<f=other>1</f>", '<f=point>{"x": 1}'],
    ),
    "words": (word('a "b"\n'), ['a "b"\n'], ["a"]),
    "one after the other": (
        form("sequence", elements=[word("n="), form("regex", pattern="[0-9]")]),
        ["n=1"],
        ["n=", "1"],
    ),
    "one of several": (form("or", elements=[word("a"), word("b")]), ["a", "b"], ["ab", ""]),
    "a grammar": (form("grammar", grammar='start: "x" "y"?'), ["x", "xy"], ["y"]),
    "a schema": (form("json_schema", json_schema=POINT), ['{"x":1}'], ["{}"]),
    "text in a tag": (tag("<t>", form("any_text"), "</t>"), ["<t>a <b> c</t>", "<t></t>"], ["<t>a", "<t>a</t>b"]),
    "tags between": (
        form("tags_with_separator", tags=[A, B], separator=", "),
        ["", "<a>1</a>", "<a>1</a>, <b>2</b>"],
        ["<a>1</a><b>2</b>", "<a>x</a>"],
    ),
    "tags between, at least one": (
        form("tags_with_separator", tags=[A], separator=",", at_least_one=True, stop_after_first=True),
        ["<a>1</a>"],
        ["", "<a>1</a>,<a>1</a>"],
    ),
    "tags in text": (
        form("triggered_tags", triggers=["<a", "<b"], tags=[A, B]),
        ["x", "x<a>1</a><b>2</b>y"],
        ["<a>x</a>"],
    ),
    "tags in text, at least one": (
        form("triggered_tags", triggers=["<a>"], tags=[A], at_least_one=True),
        ["x<a>1</a>", "<a>1</a>y"],
        ["x"],
    ),
    "tags in text, the last word": (
        form("triggered_tags", triggers=["<a>"], tags=[A], stop_after_first=True),
        ["x", "x<a>1</a>"],
        ["<a>1</a>y"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_form_means(name: str) -> None:
    document, good, bad = CASES[name]
    at = matcher(Kind.STRUCTURAL_TAG, document if name == "the older form" else {"format": document})
    assert [text for text in good if not takes(at, text)] == []
    assert [text for text in bad if takes(at, text)] == []


def test_a_trigger_may_be_a_special_token() -> None:
    called = tag("[CALL]f", form("regex", pattern="[0-9]"), "")
    at = matcher(Kind.STRUCTURAL_TAG, {"format": form("triggered_tags", triggers=["[CALL]"], tags=[called])})
    assert takes(at, "text")
    assert at.accept(ord("t"))
    assert at.accept(CALL)
    assert allowed(at) == {ord("f")}
    assert takes(at, "f7")


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ([], "structured_outputs"),
        ({}, "structured_outputs.structures"),
        ({"format": word("a") | {"type": "xml"}}, "structured_outputs.format"),
        ({"format": form("const_string")}, "structured_outputs.format.value"),
        ({"format": form("sequence", elements=[])}, "structured_outputs.format.elements"),
        ({"format": form("or", elements=[form("regex")])}, "structured_outputs.format.elements[0].pattern"),
        ({"format": form("json_schema", json_schema=POINT, style="qwen_xml")}, "structured_outputs.format.style"),
        (
            {"format": form("json_schema", json_schema={"nullable": True})},
            "structured_outputs.format.json_schema.nullable",
        ),
        ({"format": tag("<a>", 3, "")}, "structured_outputs.format.content"),
        ({**OLDER, "triggers": ["<g="]}, "structured_outputs.tags[0].begin"),
        ({**OLDER, "triggers": []}, "structured_outputs.triggers"),
        ({**OLDER, "structures": [{"begin": "<f=", "end": ""}]}, "structured_outputs.structures[0].schema"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(document: Any, place: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        matcher(Kind.STRUCTURAL_TAG, document)
    assert refused.value.field_name == place


def test_levels_are_bounded() -> None:
    document = word("a")
    for _ in range(40):
        document = form("or", elements=[document])
    with pytest.raises(InvalidRequest, match="at most 32 levels"):
        matcher(Kind.STRUCTURAL_TAG, {"format": document})
    with pytest.raises(InvalidRequest, match="malformed JSON"):
        matcher(Kind.STRUCTURAL_TAG, '{"format":' + json.dumps([]) * 2)
