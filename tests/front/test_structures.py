"""What an answer must be: formats, schemas and tools of each API as one structure, and calls that are valid by it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from tritandem.contracts.grammars import Kind
from tritandem.front.ask import Ask, read_ask
from tritandem.front.errors import ApiError, from_client
from tritandem.front.fields import CHAT, COMPLETIONS
from tritandem.front.formats.choose import STRUCTURES, Formats
from tritandem.front.formats.structure import ANY_TEXT
from tritandem.front.formats.turn import Turn
from tritandem.front.messages import Messages
from tritandem.front.responses import Responses
from tritandem.front.structures import with_structure
from tritandem.grammar import Matcher
from tritandem.triton_io.request.guides import read_guide
from tritandem_client import InvalidRequest as Refused

from tests.grammar.spelled import END, allowed, matcher, takes

HELLO = [{"role": "user", "content": "hello"}]
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "op": {"enum": ["x", "ß"]}},
    "required": ["a"],
    "additionalProperties": False,
}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": ARGUMENTS}}
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
STRICT = {"type": "function", "function": {**ADD["function"], "strict": True}}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT, "strict": True}}
HERMES = Formats("hermes")
FORMATS = [Formats(name) for name in STRUCTURES]
COMPACT = json.dumps(POINT, separators=(",", ":"))


def structure(formats: Formats = HERMES, door: str = CHAT, **fields: Any) -> Any:
    """What the scheduler is sent; None: nothing."""
    ask = {"messages": HELLO} if door == CHAT else {"prompt": "hello"}
    options = with_structure(read_ask(door, {**ask, **fields}), formats).options
    return options.get("sampling_parameters", {}).get("structured_outputs")


def compiled(said: Any) -> Matcher:
    """As the scheduler reads it."""
    guide = read_guide("structured_outputs", said)
    assert guide is not None
    return matcher(guide.grammar.kind, guide.grammar.text, thinking=guide.grammar.thinking)


@pytest.mark.parametrize("door", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": SCHEMA_FORMAT}, {"json": COMPACT}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"guided_json": POINT}, {"json": COMPACT}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": '["a","b"]'}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
        ({"guided_json": POINT, "response_format": SCHEMA_FORMAT}, {"json": COMPACT}),
    ],
)
def test_each_field_asks_for_one_structure(fields: dict[str, Any], expected: Any, door: str) -> None:
    assert structure(door=door, **fields) == expected


def test_a_schema_in_anthropics_and_in_the_newer_api_is_the_same() -> None:
    said = Responses().to_chat(
        {"input": "hello", "text": {"format": {**SCHEMA_FORMAT["json_schema"], "type": "json_schema"}}}
    )
    assert with_structure(read_ask(CHAT, said), HERMES).options["sampling_parameters"] == {
        "structured_outputs": {"json": COMPACT}
    }
    for name in ("output_format", "output_config"):
        given: Any = {"type": "json_schema", "schema": POINT}
        body = {"messages": HELLO, "max_tokens": 5, name: given if name == "output_format" else {"format": given}}
        ask = with_structure(read_ask(CHAT, Messages().to_chat(body)), HERMES)
        assert ask.options["sampling_parameters"] == {"structured_outputs": {"json": COMPACT}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
        ({"guided_regex": 3}, "guided_regex"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": SCHEMA_FORMAT}, "response_format.json_schema.schema"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
    ],
)
def test_what_asks_for_no_structure_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        structure(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_a_refusal_of_the_server_names_what_the_client_wrote() -> None:
    def param(ask: Ask, field: str) -> str | None:
        return from_client(Refused(field, 1, "2"), with_structure(ask, HERMES).names).param

    said = read_ask(CHAT, {"messages": HELLO, "response_format": SCHEMA_FORMAT})
    assert param(said, "structured_outputs.json") == "response_format.json_schema.schema"
    assert param(said, "structured_outputs.json.properties.x.nullable").endswith(".schema.properties.x.nullable")
    called = read_ask(CHAT, {"messages": HELLO, "tools": [STRICT]})
    assert param(called, "structured_outputs.structural_tag.format.tags[0].content") == "tools"
    assert Responses().param("response_format.json_schema.schema") == "text.format.schema"


def test_a_structure_begins_after_the_thoughts_of_models_that_think() -> None:
    for word, is_open in (("think", False), ("think-open", True)):
        said = structure(Formats("none", word), response_format=SCHEMA_FORMAT)
        assert said == {"json": COMPACT, "thinking": {"begin": "<think>", "end": "</think>", "open": is_open}}
        assert takes(compiled(said), ("" if is_open else "<think>") + 'hm {</think>\n\n{"x":1}')
    assert "thinking" not in structure(Formats("none", "think"), COMPLETIONS, response_format=SCHEMA_FORMAT)
    own = {"begin": "[", "end": "]", "open": True}
    assert structure(Formats("none", "think"), structured_outputs={"regex": "a", "thinking": own})["thinking"] == own


def test_harmonys_structure_is_its_last_message() -> None:
    at = compiled(structure(Formats("harmony", "harmony"), response_format=SCHEMA_FORMAT))
    last = '<|channel|>final<|message|>{"x":1}'
    assert takes(at, last)
    assert takes(at, f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{last}")
    assert not takes(at, '{"x":1}')


# ---- calls -------------------------------------------------------------------------------------------


def walk(at: Matcher, random: np.random.Generator) -> str:
    """An answer of which each byte is drawn among those that are allowed."""
    made = bytearray()
    for _ in range(2000):
        ids = sorted(allowed(at))
        token = int(random.choice(ids)) if len(made) < 400 or END not in ids else END
        if token == END:
            return made.decode()
        assert at.accept(token)
        made.append(token)
    raise AssertionError(f"no end: {made!r}")


@pytest.mark.parametrize("formats", FORMATS, ids=lambda one: one.tools)
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "add"}}])
def test_whatever_is_drawn_where_a_call_must_be_is_a_valid_call(formats: Formats, choice: Any) -> None:
    said = structure(formats, tools=[ADD, NOW] if choice == "required" else [NOW, ADD], tool_choice=choice)
    for endless, short in (
        ('{"type": "object"}', POINT),
        ('{"type": "any_text"}', {"type": "regex", "pattern": "[a-z]"}),
    ):
        said = json.loads(json.dumps(said).replace(endless, json.dumps(short)))
    schemas = {"add": ARGUMENTS, "now": POINT}
    called = set()
    for seed in range(12):
        answer = walk(compiled(said), np.random.default_rng(seed))
        reading = formats.grammar(("add", "now"), True)
        assert reading is not None
        turn = Turn(reading).read(answer)
        assert turn.calls
        assert turn.said.strip() == ""
        for call in turn.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
            called.add(call.name)
        if choice != "required":
            assert len(turn.calls) == 1
    assert called == ({"add", "now"} if choice == "required" else {"add"})


GOOD, BAD = '{"a": 7, "op": "x"}', '{"a": 700}'
SPOKEN = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>',
    "llama3-json": '{"name": "add", "parameters": %s}',
    "mistral": '[TOOL_CALLS][{"name": "add", "arguments": %s}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>%s<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "harmony": "<|channel|>commentary to=functions.add <|constrain|>json<|message|>%s",
}


@pytest.mark.parametrize("formats", FORMATS, ids=lambda one: one.tools)
def test_a_strict_function_need_not_be_called_and_is_called_well(formats: Formats) -> None:
    assert structure(formats, tools=[ADD, NOW]) is None
    at = compiled(structure(formats, tools=[STRICT, NOW]))
    assert takes(at, SPOKEN[formats.tools] % GOOD)
    assert not takes(at, SPOKEN[formats.tools] % BAD)
    assert not takes(at, SPOKEN[formats.tools].replace("add", "subtract") % GOOD)
    assert takes(at, SPOKEN[formats.tools].replace("add", "now") % '{"anything": [1]}')
    assert takes(at, "<|channel|>final<|message|>No." if formats.tools == "harmony" else "No.")


@pytest.mark.parametrize("formats", FORMATS, ids=lambda one: one.tools)
def test_an_answer_with_a_format_is_a_call_or_of_that_format(formats: Formats) -> None:
    at = compiled(structure(formats, tools=[STRICT], response_format=SCHEMA_FORMAT))
    assert takes(at, SPOKEN[formats.tools] % GOOD)
    assert takes(at, ("<|channel|>final<|message|>" if formats.tools == "harmony" else "") + '{"x":1}')
    assert not takes(at, "No.")


def test_only_one_call_where_only_one_is_wanted() -> None:
    one = SPOKEN["hermes"] % GOOD
    several = compiled(structure(tools=[ADD], tool_choice="required"))
    assert takes(several, f"{one}\n{one}")
    single = compiled(structure(tools=[ADD], tool_choice="required", parallel_tool_calls=False))
    assert takes(single, one)
    assert not takes(single, f"{one}\n{one}")


def test_older_and_newer_forms_of_mistral_and_deepseek_are_both_taken() -> None:
    at = compiled(structure(Formats("mistral"), tools=[ADD], tool_choice="required"))
    for form in (
        '[TOOL_CALLS] [{"name": "add", "arguments": %s}]',
        "[TOOL_CALLS]add[ARGS]%s",
        "[TOOL_CALLS]add%s",
    ):
        assert takes(at, form % GOOD)
    at = compiled(structure(Formats("deepseek"), tools=[ADD], tool_choice="required"))
    older = SPOKEN["deepseek"].replace("add<｜tool▁sep｜>%s", "function<｜tool▁sep｜>add\n```json\n%s\n```")
    assert takes(at, older % GOOD)


def test_choices_and_tags_stand_beside_tools_and_text_that_is_none_does_not() -> None:
    at = compiled(structure(tools=[STRICT], guided_choice=["yes", "no"]))
    assert takes(at, "yes")
    own = {"structural_tag": {"format": {"type": "const_string", "value": "mine"}}}
    assert takes(compiled(structure(tools=[STRICT], structured_outputs=own)), "mine")
    with pytest.raises(ApiError) as refused:
        structure(tools=[STRICT], guided_json="{")
    assert refused.value.param == "guided_json"


def test_anthropics_words_for_calls() -> None:
    tool = {"name": "add", "input_schema": ARGUMENTS}
    for choice, expected in (
        ({"type": "any"}, ("add",)),
        ({"type": "tool", "name": "add"}, ("add",)),
        ({"type": "auto"}, ()),
    ):
        body = {"messages": HELLO, "max_tokens": 5, "tools": [tool], "tool_choice": choice}
        assert read_ask(CHAT, Messages().to_chat(body)).must_call == expected
    strict = Messages().to_chat({"messages": HELLO, "max_tokens": 5, "tools": [{**tool, "strict": True}]})
    assert strict["tools"][0]["function"]["strict"] is True
    named = Responses().to_chat(
        {
            "input": "x",
            "tools": [{"type": "function", **ADD["function"]}],
            "tool_choice": {"type": "function", "name": "add"},
        }
    )
    assert read_ask(CHAT, named).must_call == ("add",)
    assert Kind.STRUCTURAL_TAG.value in structure(tools=[ADD], tool_choice="required")
    assert ANY_TEXT == {"type": "any_text"}


def test_a_function_whose_parameters_refer_to_themselves_can_stand_beside_a_format() -> None:
    """Llama's form holds them deeper inside a schema than they were."""
    tree = {
        "type": "object",
        "properties": {
            "leaf": {"type": "integer"},
            "left": {"$ref": "#"},
            "same": {"$ref": "#/properties/leaf"},
            "named": {"$ref": "#/$defs/word"},
            "text": {"enum": ["a"], "default": {"$ref": "#"}},
            "const": {"$ref": "#/properties/leaf"},
        },
        "required": ["leaf"],
        "additionalProperties": False,
        "$defs": {"word": {"enum": ["x"]}},
    }
    grow = {"type": "function", "function": {"name": "grow", "parameters": tree, "strict": True}}
    said = structure(Formats("llama3-json"), tools=[grow], response_format=SCHEMA_FORMAT)
    at = compiled(said)
    inside = {"leaf": 1, "left": {"leaf": 2, "left": {"leaf": 3}}, "same": 4, "named": "x", "const": 5}
    assert takes(at, json.dumps({"name": "grow", "parameters": inside}))
    assert takes(at, json.dumps({"x": 1}))
    for wrong in ({"leaf": 1, "left": {"name": "grow"}}, {"leaf": 1, "same": "x"}, {"leaf": 1, "const": "x"}):
        assert not takes(at, json.dumps({"name": "grow", "parameters": wrong}))
