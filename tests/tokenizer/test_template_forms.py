"""Templates take content and arguments of tool calls in one form or another; clients may send any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tritandem.contracts.errors import InvalidRequest
from tritandem.tokenizer import TextTokenizer

from tests.tokenizer.byte_models import load
from tests.tokenizer.chat_styles import STYLES
from tests.tokenizer.rendering import encode_chat, render_chat

ARGUMENTS = {"city": "Köln", "days": [1, 2], "exact": None}
AS_TEXT = json.dumps(ARGUMENTS, ensure_ascii=False)
CALLS = "{% for m in messages %}{{ m.role }}: {% for call in m.tool_calls or [] %}"
END = "{% endfor %}{{ m.content or '' }}\n{% endfor %}"
QUOTING = CALLS + "{{ call.function.name }}{{ call.function.arguments | tojson }}" + END
LISTING = (
    CALLS
    + "{{ call.function.name }}({% for k, v in call.function.arguments.items() %}{{ k }}={{ v }},{% endfor %})"
    + END
)
JOINING = CALLS + "{{ call.function.name + call.function.arguments }}" + END
PRINTING = CALLS + "{{ call.function.name ~ call.function.arguments }}" + END
FLAT = CALLS + "{% set f = call.function or call %}{{ f.name }}{{ f.arguments | tojson }}" + END
# Demands what real ones demand: ids of nine characters, answers behind calls, a declared tool.
STRICT = (
    "{% if not tools %}{{ raise_exception('declare the tools') }}{% endif %}{% for m in messages %}"
    "{% if m.tool_calls %}{% if m.tool_calls[0].id | length != 9 %}{{ raise_exception('nine characters') }}{% endif %}"
    "{% if m.content is defined %}{{ raise_exception('a call or an answer') }}{% endif %}"
    "{{ m.tool_calls[0].function.name }}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def asked(arguments: Any, **call: Any) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    calls = [{"id": "123456789", "type": "function", "function": function, **call}]
    answer = {"role": "tool", "tool_call_id": "123456789", "name": "weather", "content": "rain"}
    return [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        answer,
    ]


@pytest.mark.parametrize(
    "arguments", [ARGUMENTS, AS_TEXT, json.dumps(ARGUMENTS, indent=1)], ids=["object", "text", "spaced"]
)
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (QUOTING, f"weather{AS_TEXT}"),
        (LISTING, "weather(city=Köln,days=[1, 2],exact=None,)"),
        (FLAT, f"weather{AS_TEXT}"),
        (STRICT, f"weather{AS_TEXT}"),
        (STYLES["thinking"].template, f'{{"name": "weather", "arguments": {AS_TEXT}}}'),
    ],
    ids=["quoting", "listing", "flat", "strict", "thinking"],
)
def test_arguments_become_objects_where_the_template_takes_objects(
    template: str, expected: str, arguments: Any, tmp_path: Path
) -> None:
    tokenizer = load(tmp_path, template)
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    assert expected in render_chat(tokenizer, asked(arguments), tools=[tool])


@pytest.mark.parametrize(
    ("arguments", "expected"), [(ARGUMENTS, AS_TEXT), (AS_TEXT, AS_TEXT), ('{"a" : 1}', '{"a" : 1}')]
)
@pytest.mark.parametrize(
    "template", [JOINING, PRINTING, STYLES["string_calls"].template], ids=["joining", "printing", "fenced"]
)
def test_arguments_become_text_where_the_template_takes_text(
    template: str, arguments: Any, expected: str, tmp_path: Path
) -> None:
    style = STYLES["string_calls"]
    assert expected in render_chat(load(tmp_path, template, style.special, style.plain), asked(arguments))


@pytest.mark.parametrize("template", [QUOTING, JOINING])
@pytest.mark.parametrize("arguments", ["{", "[1]", "3", '{"a": 1} x', 3, ["a"], "[" * 100_000])
def test_malformed_arguments_are_named(template: str, arguments: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render_chat(load(tmp_path, template), asked(arguments))
    assert caught.value.field_name == "messages[1].tool_calls[0].function.arguments"


@pytest.mark.parametrize("arguments", ["", " ", None, {}])
def test_a_call_without_arguments_has_none(arguments: Any, tmp_path: Path) -> None:
    assert "weather{}" in render_chat(load(tmp_path, QUOTING), asked(arguments))


def test_a_call_without_the_word_function_is_one_too(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, FLAT)
    calls = [{"name": "weather", "arguments": '{"a": 1}'}]
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": calls}]
    assert 'weather{"a": 1}' in render_chat(tokenizer, messages)
    calls[0]["arguments"] = "{"
    with pytest.raises(InvalidRequest, match=r"messages\[1\]\.tool_calls\[0\]\.arguments"):
        render_chat(tokenizer, messages)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.fixture
def of_text(tmp_path: Path) -> TextTokenizer:
    return load(tmp_path, "{% for m in messages %}{{ m.role + ':' + m.content }}|{% endfor %}", ["<E>"])


@pytest.fixture
def of_parts(tmp_path: Path) -> TextTokenizer:
    """Reads a text as characters without a type, silently."""
    loop = "{% for part in m.content %}{% if part.type == 'text' %}[{{ part.text }}]{% endif %}{% endfor %}"
    return load(tmp_path, "{% for m in messages %}{{ m.role }}:" + loop + "|{% endfor %}", ["<E>"])


def test_parts_are_joined_for_a_template_of_texts(of_text: TextTokenizer) -> None:
    messages = [{"role": "system", "content": parts("a")}, {"role": "user", "content": parts("b", "c")}]
    assert render_chat(of_text, messages) == "system:a|user:b\nc|"
    ids = encode_chat(of_text, [{"role": "user", "content": parts("<", "E>", "<E>")}]).ids
    assert (ids < 256).all()


def test_a_text_becomes_a_part_for_a_template_of_parts(of_parts: TextTokenizer) -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": parts("b", "c")}]
    assert render_chat(of_parts, messages) == "system:[a]|user:[b][c]|"


def test_a_template_of_both_gets_what_the_client_sent(tmp_path: Path) -> None:
    style = STYLES["parts"]
    tokenizer = load(tmp_path, style.template, style.special, style.plain)
    for content in ("b", parts("b ", "c")):
        messages = [{"role": "user", "content": content}]
        expected = tokenizer._source.renderer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert render_chat(tokenizer, messages) == expected


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "image", "video"])
def test_what_no_model_here_reads_is_refused_by_name(
    kind: str, of_text: TextTokenizer, of_parts: TextTokenizer
) -> None:
    for tokenizer in (of_text, of_parts):
        with pytest.raises(InvalidRequest) as caught:
            render_chat(tokenizer, [{"role": "user", "content": [*parts("see"), {"type": kind, kind: {"url": "x"}}]}])
        assert caught.value.field_name == "messages[0].content[1].type"


# What real ones make of a call's content: they read it whatever it is, refuse one, or take a call by its absence.
SHOWN = "{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %}"
READING = CALLS + SHOWN + "{{ m.content.strip() }}{% endfor %}"
ABSENT = "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for call in m.tool_calls %}"
ABSENT += SHOWN + "{% else %}{{ m.content + '' }}{% endif %}{% endfor %}"


@pytest.mark.parametrize("template", [READING, ABSENT, STRICT, QUOTING], ids=["reading", "absent", "strict", "quoting"])
@pytest.mark.parametrize("content", [None, "absent"])
def test_a_call_without_an_answer_is_put_as_the_template_takes_it(
    template: str, content: str | None, tmp_path: Path
) -> None:
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    messages = asked(ARGUMENTS)
    if content:
        del messages[1]["content"]
    said = render_chat(load(tmp_path, template), messages, tools=[tool])
    assert f"weather{AS_TEXT}" in said
    assert "rain" in said
