"""What models write, read by its format: one text, one meaning, however it is cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tritandem.front.formats.choose import TOOLS, Formats, choose
from tritandem.front.formats.text import Said, Thought
from tritandem.front.formats.turn import ID_CHARS, Begun, More, Turn
from tritandem.front.worker import prompts_of

NAMES = ("add", "get_weather", "get")
Meaning = tuple[str, str, list[tuple[str, Any]]]  # said, thought, calls
CITY = '{"city": "Köln \\"}<|end|>{", "days": [1, {"a": null}]}'
ARGS = json.loads(CITY)
TWO = [("get_weather", ARGS), ("add", {"a": 1})]


def opened(text: str) -> str:
    return f"<｜tool▁call▁begin｜>{text}<｜tool▁call▁end｜>"


CASES: dict[str, tuple[Formats, str, Meaning]] = {
    "hermes": (
        Formats("hermes"),
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>\n'
        '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
        ("Let me see.", "", TWO),
    ),
    "hermes, a list": (
        Formats("hermes"),
        f'<tool_call>[{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "add", "arguments": "{{\\"a\\": 1}}"}}]'
        "</tool_call>",
        ("", "", TWO),
    ),
    "hermes, nothing to pass": (
        Formats("hermes"),
        '<tool_call>{"name": "add"}</tool_call><tool_call>{"name": "get", "arguments": null}</tool_call> Done.',
        (" Done.", "", [("add", {}), ("get", {})]),
    ),
    "hermes, no call": (
        Formats("hermes"),
        'The tag <tool_call> begins {"name": 7} and </tool_call> ends it. \n',
        ('The tag <tool_call> begins {"name": 7} and </tool_call> ends it. \n', "", []),
    ),
    "hermes, cut off": (Formats("hermes"), 'Yes <tool_call>{"name": "ad', ('Yes <tool_call>{"name": "ad', "", [])),
    "hermes, cut off in the mark behind a call": (
        Formats("hermes"),
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_cal',
        ("", "", [("add", {"a": 1})]),
    ),
    "hermes, a call whose end is another word": (
        Formats("hermes"),
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_x',
        ("</tool_x", "", [("add", {"a": 1})]),
    ),
    "llama": (
        Formats("llama3-json"),
        f'{{"name": "get_weather", "parameters": {CITY}}}; {{"name": "add", "parameters": {{"a": 1}}}}',
        ("", "", TWO),
    ),
    "llama, with its mark": (
        Formats("llama3-json"),
        '<|python_tag|>{"type": "function", "name": "add", "parameters": {"a": 1}}',
        ("", "", [("add", {"a": 1})]),
    ),
    "llama, an answer in JSON": (
        Formats("llama3-json"),
        '\n{"name": "Köln", "parameters": {"a": 1}} {"x": 1}',
        ('\n{"name": "Köln", "parameters": {"a": 1}} {"x": 1}', "", []),
    ),
    "llama, in the midst of an answer": (
        Formats("llama3-json"),
        'As JSON: {"name": "add", "parameters": {}}',
        ('As JSON: {"name": "add", "parameters": {}}', "", []),
    ),
    "mistral": (
        Formats("mistral"),
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "add", "arguments": {{"a": 1}}}}]',
        ("", "", TWO),
    ),
    "mistral, by names": (
        Formats("mistral"),
        f'Let me see. [TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{CITY}[TOOL_CALLS]add{{"a": 1}}',
        ("Let me see.", "", TWO),
    ),
    "mistral, its mark not shown": (
        Formats("mistral"),
        f'[{{"name": "get_weather", "arguments": {CITY}}}, {{"name": "add", "arguments": {{"a": 1}}}}]',
        ("", "", TWO),
    ),
    "mistral, names without a mark": (Formats("mistral"), f'get_weather{CITY}add{{"a": 1}}', ("", "", TWO)),
    "mistral, a list of numbers": (Formats("mistral"), '[1, 2] and get {"a"}', ('[1, 2] and get {"a"}', "", [])),
    "mistral, a strange name": (Formats("mistral"), "[TOOL_CALLS]a b{1}", ("[TOOL_CALLS]a b{1}", "", [])),
    "deepseek, fenced": (
        Formats("deepseek"),
        "Yes.\n\n<｜tool▁calls▁begin｜>"
        + opened(f"function<｜tool▁sep｜>get_weather\n```json\n{CITY}\n```")
        + "\n"
        + opened('function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```')
        + "<｜tool▁calls▁end｜>",
        ("Yes.", "", TWO),
    ),
    "deepseek, bare, after a thought": (
        Formats("deepseek", "think-open"),
        "I call.\n</think>\n\n<｜tool▁calls▁begin｜>"
        + opened(f"get_weather<｜tool▁sep｜>{CITY}")
        + opened('add<｜tool▁sep｜>{"a": 1}')
        + "<｜tool▁calls▁end｜>",
        ("", "I call.", TWO),
    ),
    "harmony": (
        Formats("harmony", "harmony"),
        "<|channel|>analysis<|message|>We need the weather.<|end|><|start|>assistant<|channel|>commentary"
        f" to=functions.get_weather <|constrain|>json<|message|>{CITY.replace('<|end|>', '')}<|call|><|start|>assistant"
        ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>',
        ("", "We need the weather.", [("get_weather", {**ARGS, "city": 'Köln "}{'}), ("add", {"a": 1})]),
    ),
    "harmony, an answer": (
        Formats("harmony", "harmony"),
        "<|channel|>analysis<|message|>Easy.<|end|><|start|>assistant<|channel|>final<|message|>Paris.<|return|>",
        ("Paris.", "Easy.", []),
    ),
    "harmony, its marks not shown": (Formats("harmony"), "analysisEasy.", ("analysisEasy.", "", [])),
    "a thought": (Formats(reasoning="think"), "<think>\nHm < so.\n</think>\n\nParis. ", ("Paris. ", "Hm < so.", [])),
    "no thought": (Formats(reasoning="think"), " Paris </think>.", (" Paris </think>.", "", [])),
    "a thought that the prompt opened": (Formats(reasoning="think-open"), "Hm.\n</think>\nYes", ("Yes", "Hm.", [])),
    "a thought cut off": (Formats("hermes", "think-open"), "<think>Hm. </thi", ("", "Hm. </thi", [])),
    "a thought, then a call": (
        Formats("hermes", "think"),
        '<think>I add.</think><tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>',
        ("", "I add.", [("add", {"a": 1})]),
    ),
}


def turn_of(formats: Formats, parallel: bool = True) -> Turn:
    grammar = formats.grammar(NAMES, tools=True)
    assert grammar is not None
    return Turn(grammar, parallel)


def meaning(turn: Turn) -> Meaning:
    return turn.said, turn.thought, [(call.name, json.loads(call.arguments)) for call in turn.calls]


def raw(turn: Turn) -> tuple[str, str, list[tuple[str, str]]]:
    return turn.said, turn.thought, [(call.name, call.arguments) for call in turn.calls]


@pytest.mark.parametrize("name", CASES)
def test_a_text_means(name: str) -> None:
    formats, text, meant = CASES[name]
    assert meaning(turn_of(formats).read(text)) == meant


@pytest.mark.parametrize("name", CASES)
def test_the_meaning_does_not_depend_on_how_the_text_is_cut(name: str) -> None:
    formats, text, meant = CASES[name]
    draw = random.Random(name)
    cuts = [[i] for i in range(1, len(text))] + [list(range(1, len(text)))]
    cuts += [sorted(draw.sample(range(1, len(text)), draw.randint(1, 6))) for _ in range(200)]
    for places in cuts:
        turn = turn_of(formats)
        for begin, end in zip([0, *places], [*places, len(text)], strict=True):
            turn.feed(text[begin:end])
        turn.end()
        assert meaning(turn) == meant, places


@pytest.mark.parametrize("tools", TOOLS)
@pytest.mark.parametrize("reasoning", ["none", "think", "think-open"])
def test_texts_of_any_kind_have_one_meaning_and_no_end_is_an_error(tools: str, reasoning: str) -> None:
    formats = Formats(tools, reasoning)
    draw = random.Random(tools + reasoning)
    pieces = [piece for case in CASES.values() for piece in (case[1][: len(case[1]) // 2], case[1][-20:])]
    marks = [mark for _, text, _ in CASES.values() for mark in text.replace(">", "> ").split() if "<" in mark]
    for _ in range(300):
        text = "".join(
            draw.choice([*pieces, *marks, *'{}[]",: \n<a1', "add", "\\"]) for _ in range(draw.randint(1, 12))
        )
        whole = raw(turn_of(formats).read(text))
        turn = turn_of(formats)
        while text:
            length = draw.randint(1, 5)
            turn.feed(text[:length])
            text = text[length:]
        turn.end()
        assert raw(turn) == whole


@pytest.mark.parametrize("name", [name for name, (_, _, meant) in CASES.items() if not any(meant[1:])])
def test_without_calls_and_thoughts_nothing_is_lost(name: str) -> None:
    formats, text, _ = CASES[name]
    assert turn_of(formats).read(text).said == text


def test_arguments_go_on_while_they_come() -> None:
    turn = turn_of(Formats("hermes", "think"))
    assert turn.feed("<think>a") == [Thought("a")]
    assert turn.feed(" b</th") == [Thought(" b")]
    assert turn.feed("ink>Well <tool") == [Said("Well")]
    assert turn.feed('_call>{"name": "add", "argu') == []
    assert turn.feed('ments": {"a"') == [Begun(0, turn.calls[0]), More(0, '{"a"')]
    assert turn.feed(": 1}") == [More(0, ": 1}")]
    assert turn.feed("}</tool_call>") == []
    assert turn.end() == []


def test_further_calls_are_left_out_when_only_one_is_wanted() -> None:
    turn = turn_of(Formats("hermes"), parallel=False).read(CASES["hermes"][1])
    assert [call.name for call in turn.calls] == ["get_weather"]
    assert json.loads(turn.calls[0].arguments) == ARGS


def test_ids_of_calls_are_what_templates_take() -> None:
    turn = turn_of(Formats("hermes")).read(CASES["hermes"][1])
    ids = [call.id for call in turn.calls]
    assert len(set(ids)) == 2
    assert all(len(one) == ID_CHARS and one.isalnum() for one in ids)


QWEN = (
    '{%- if tools %}<tool_call>\\n{"name": <function-name>}</tool_call>{%- endif %}'
    "{% set c = 'a</think>b'.split('</think>') %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
)
SILENT = "{%- if silent is defined and silent %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
TEMPLATES = {
    QWEN + SILENT + "{%- endif %}": Formats("hermes", "think"),
    QWEN + "{{- '<think>\\n' }}{%- endif %}": Formats("hermes", "think-open"),
    QWEN.replace("name", "<invoke name=x>") + "{%- endif %}": Formats("none", "think"),
    QWEN.replace("name", "<function=x>") + "{{- '<think>\\n' }}{%- endif %}": Formats("none", "think-open"),
    # The mark is a variable's; what the end is made of depends on what nobody asks for.
    "{% set mark = '<think>' %}{% set end = '</think>' %}{{ messages[0].content }}{{ mark }}": Formats(
        "none", "think-open"
    ),
    "{{ messages[0].content }}{% if thinking %}{{ '<think>' }}{% else %}{{ '</think>' }}{% endif %}": Formats(
        "none", "think"
    ),
    "{% if not thinking %}{{ '<think></think>' }}{% endif %}": Formats("none", "think"),
    "{{ messages[0].nothing.at_all }}</think>": Formats("none", "think"),
    "{% if tools %}[AVAILABLE_TOOLS][TOOL_CALLS]{% endif %}": Formats("mistral", "none"),
    "{% if tools %}<｜tool▁call▁begin｜>{% endif %}</think>{% if add_generation_prompt %}"
    "{% if thinking %}{{'<think>'}}{% else %}{{'</think>'}}{% endif %}{% endif %}": Formats("deepseek", "think"),
    "{% if tools %}<|start|><|channel|>analysis{% endif %}": Formats("harmony", "harmony"),
    '{% if tools %}Environment: ipython {"name": "", "parameters": {}}{% endif %}': Formats("llama3-json", "none"),
    "{% for m in messages %}{{ m.content }}{% endfor %}": Formats(),
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_template_tells_the_formats_and_its_prompt_whether_a_thought_is_open(template: str) -> None:
    assert choose([template], prompts=prompts_of([template])) == TEMPLATES[template]


def test_the_operator_knows_better() -> None:
    assert choose([QWEN], "none", "think-open") == Formats("none", "think-open")
    assert choose([], "mistral") == Formats("mistral")


def test_an_answer_without_tools_and_thoughts_is_not_read_at_all() -> None:
    assert Formats("hermes").grammar(NAMES, tools=False) is None
    assert Formats().grammar((), tools=True) is None
