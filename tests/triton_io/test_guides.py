"""Structures of answers in the words of other servers, and their way to be tried before they are taken."""

from __future__ import annotations

import json
import queue
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils
from tritandem.contracts.errors import InvalidRequest
from tritandem.contracts.grammars import Grammar, Kind, Thinking
from tritandem.grammar.trials import Trials
from tritandem.scheduler.ports import FinishedRequest
from tritandem.triton_io.plugs.scheduler import SchedulerPlug
from tritandem.triton_io.plugs.tokenizer import TokenizerPlug
from tritandem.triton_io.request.guides import GUIDE, GUIDE_TYPE, Guide, read_guide
from tritandem.triton_io.request.sampling_fields import merge
from tritandem.triton_io.request.tensor_values import Inputs

from tests.grammar.spelled import END, ROWS, byte_tokenizer
from tests.triton_io.handed_over import KEY, answered_by, received, text
from tests.triton_io.test_scheduler_plug import RecordingService, plug_of, tokenized
from tests.triton_io.test_tokenizer_plug import SlowForLongTexts

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}
WRITTEN = json.dumps(SCHEMA, separators=(",", ":"))
WAIT_S = 60.0


@pytest.mark.parametrize(
    ("name", "value", "field", "grammar"),
    [
        ("guided_json", SCHEMA, "guided_json", Grammar(Kind.JSON_SCHEMA, WRITTEN)),
        ("guided_json", '{"type": "null"}', "guided_json", Grammar(Kind.JSON_SCHEMA, '{"type": "null"}')),
        ("guided_regex", "a+", "guided_regex", Grammar(Kind.REGEX, "a+")),
        ("guided_choice", ["a", "b"], "guided_choice", Grammar(Kind.CHOICE, '["a","b"]')),
        ("guided_choice", '["a","b"]', "guided_choice", Grammar(Kind.CHOICE, '["a","b"]')),
        ("guided_grammar", 'start: "a"', "guided_grammar", Grammar(Kind.GRAMMAR, 'start: "a"')),
        ("structured_outputs", {"json": SCHEMA}, "structured_outputs.json", Grammar(Kind.JSON_SCHEMA, WRITTEN)),
        ("structured_outputs", '{"regex": "a"}', "structured_outputs.regex", Grammar(Kind.REGEX, "a")),
        ("structured_outputs", {"json_object": True}, "structured_outputs.json_object", Grammar(Kind.JSON_OBJECT)),
        (
            "structured_outputs",
            {"choice": ["a"], "regex": None, "json_object": False, "disable_fallback": True},
            "structured_outputs.choice",
            Grammar(Kind.CHOICE, '["a"]'),
        ),
        (
            "structured_outputs",
            {"structural_tag": {"format": {}}},
            "structured_outputs.structural_tag",
            Grammar(Kind.STRUCTURAL_TAG, '{"format":{}}'),
        ),
        (
            "structured_outputs",
            {"regex": "a", "thinking": {"begin": "<t>", "end": "</t>", "open": True}},
            "structured_outputs.regex",
            Grammar(Kind.REGEX, "a", Thinking("<t>", "</t>", True)),
        ),
        ("guided_decoding", {"grammar": "g"}, "guided_decoding.grammar", Grammar(Kind.GRAMMAR, "g")),
    ],
)
def test_each_name_means_one_grammar(name: str, value: Any, field: str, grammar: Grammar) -> None:
    assert read_guide(name, value) == Guide(field, grammar)
    parameters = Inputs({"sampling_parameters": text(json.dumps({name: value}))})
    assert merge(parameters, {}).guide == Guide(field, grammar)
    given = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    assert merge(Inputs({}), {name: given}).guide == Guide(field, grammar)


@pytest.mark.parametrize("value", [{}, {"json": None}, {"json_object": False}])
def test_nothing_asks_for_nothing(value: Any) -> None:
    assert read_guide("structured_outputs", value) is None


@pytest.mark.parametrize(
    ("name", "value", "field"),
    [
        ("guided_json", 3, "guided_json"),
        ("guided_regex", "", "guided_regex"),
        ("guided_choice", {"a": 1}, "guided_choice"),
        ("guided_grammar", ["a"], "guided_grammar"),
        ("structured_outputs", [], "structured_outputs"),
        ("structured_outputs", "{", "structured_outputs"),
        ("structured_outputs", {"json": {}, "regex": "a"}, "structured_outputs"),
        ("structured_outputs", {"yaml": "a"}, "structured_outputs"),
        ("structured_outputs", {"json_object": 1}, "structured_outputs.json_object"),
        ("structured_outputs", {"regex": "a", "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
        ("structured_outputs", {"regex": "a", "thinking": {"end": "x"}}, "structured_outputs.thinking"),
        ("structured_outputs", {"thinking": {"begin": "a", "end": "b"}}, "structured_outputs"),
    ],
)
def test_what_is_no_structure_is_refused_by_name(name: str, value: Any, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_guide(name, value)
    assert refused.value.field_name == field


@pytest.mark.parametrize(
    ("kind", "guide", "grammar"),
    [
        ("json", None, Grammar(Kind.JSON_OBJECT)),
        ("json", "", Grammar(Kind.JSON_OBJECT)),
        ("json_schema", WRITTEN, Grammar(Kind.JSON_SCHEMA, WRITTEN)),
        ("regex", "a", Grammar(Kind.REGEX, "a")),
        ("ebnf_grammar", 'root ::= "a"', Grammar(Kind.GRAMMAR, 'root ::= "a"')),
        ("structural_tag", "{}", Grammar(Kind.STRUCTURAL_TAG, "{}")),
        ("", "", None),
        ("yaml", "a", GUIDE_TYPE),
        ("regex", None, GUIDE),
        ("json", "{}", GUIDE),
        (None, "a", GUIDE),
    ],
)
def test_the_two_tensors_of_tensorrt_llm_mean_the_same(
    kind: str | None, guide: str | None, grammar: Grammar | str | None
) -> None:
    given = {name: text(value) for name, value in ((GUIDE_TYPE, kind), (GUIDE, guide)) if value is not None}
    if isinstance(grammar, str):
        with pytest.raises(InvalidRequest) as refused:
            merge(Inputs(given), {})
        assert refused.value.field_name == grammar
    else:
        made = merge(Inputs(given), {}).guide
        assert (made and made.grammar) == grammar


def test_two_structures_must_be_the_same() -> None:
    same = {GUIDE_TYPE: text("regex"), GUIDE: text("a"), "sampling_parameters": text('{"guided_regex": "a"}')}
    assert merge(Inputs(same), {}).guide == Guide(GUIDE, Grammar(Kind.REGEX, "a"))
    with pytest.raises(InvalidRequest, match="guided_regex: given 'a structure beside guided_decoding_guide'"):
        merge(Inputs(same | {"sampling_parameters": text('{"guided_regex": "b"}')}), {})


def test_a_structure_leaves_no_list_of_allowed_tokens() -> None:
    both = text('{"guided_regex": "a", "allowed_token_ids": [3]}')
    with pytest.raises(InvalidRequest, match="nothing beside guided_regex"):
        merge(Inputs({"sampling_parameters": both}), {})


def test_bad_words_must_leave_a_choice() -> None:
    asked = {"guided_choice": ["yes, sir", "no, sir"]}

    def given(*words: str, **more: Any) -> Any:
        return merge(Inputs({"sampling_parameters": text(json.dumps({**asked, "bad_words": words, **more}))}), {})

    assert given("yes").guide == Guide("guided_choice", Grammar(Kind.CHOICE, '["yes, sir","no, sir"]'))
    for words in (("sir",), ("yes", "no")):
        with pytest.raises(InvalidRequest, match="leave one of the texts of guided_choice") as refused:
            given(*words)
        assert refused.value.field_name == "bad_words"
    with pytest.raises(InvalidRequest, match="bad_words"):
        given("yes", "no", guided_choice=["no"])
    asked = {"guided_regex": "yes|no"}
    assert given("yes", "no").guide is not None  # of other structures the engine says it


# ---- tried before it is taken ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    made = Trials(byte_tokenizer(), ROWS, [END])
    yield made
    made.close()


@pytest.fixture
def asked() -> list[bool]:
    """Of each call of the tokenizer: whether it had a grammar to try."""
    return []


@pytest.fixture
def service(trials: Trials, asked: list[bool]) -> RecordingService:
    answer = answered_by(TokenizerPlug(SlowForLongTexts(), KEY, trials=trials))

    def noted(request: pb_utils.InferenceRequest) -> list[Any]:
        asked.append("grammar" in json.loads(request.parameters()))
        return answer(request)

    pb_utils.InferenceRequest.models["tokenizer"] = noted
    return RecordingService()


@pytest.fixture
def refused() -> queue.Queue[FinishedRequest]:
    return queue.Queue()


@pytest.fixture
def plug(service: RecordingService, refused: queue.Queue[FinishedRequest]) -> Iterator[SchedulerPlug]:
    with closing(plug_of(service, refused.put)) as plug:
        yield plug


PROMPTS: dict[str, Any] = {
    "text": lambda: {"text_input": text("hi")},
    "ids": lambda: {"input_ids": np.array([[104, 105]], np.int32)},
    "of the ensemble": lambda: tokenized(104, 105),
}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_grammar_is_tried_once_and_reaches_the_service(
    plug: SchedulerPlug, service: RecordingService, asked: list[bool], prompt: str
) -> None:
    for _ in range(2):
        request, _ = received(PROMPTS[prompt]() | {GUIDE_TYPE: text("regex"), GUIDE: text("a+")})
        plug.execute([request])
        assert service.arrived.acquire(timeout=WAIT_S)
    assert [one.grammar for one, _ in service.taken] == [Grammar(Kind.REGEX, "a+")] * 2
    assert [one.input_ids.tolist() for one, _ in service.taken] == [[104, 105]] * 2
    assert asked == ([True, False] if prompt == "text" else [True])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_grammar_that_cannot_be_compiled_is_refused_by_name_and_takes_no_place(
    plug: SchedulerPlug, service: RecordingService, refused: queue.Queue[FinishedRequest], prompt: str
) -> None:
    bad, sender = received(PROMPTS[prompt]() | {"sampling_parameters": text('{"guided_regex": "("}')})
    good, _ = received(PROMPTS[prompt]())
    plug.execute([bad, good])
    [response] = sender.wait_end()
    assert response.error().message().startswith("REJECTED_INVALID: guided_regex: given '('")
    assert refused.get(timeout=WAIT_S).outcome.value == "REJECTED_INVALID"
    assert service.arrived.acquire(timeout=WAIT_S)
    assert [one.grammar for one, _ in service.taken] == [None]


def test_no_client_can_send_what_the_scheduler_sends_the_tokenizer(plug: SchedulerPlug, trials: Trials) -> None:
    request, sender = received(PROMPTS["text"](), {"grammar": '["x", "[]"]'})
    plug.execute([request])
    assert "grammar: given 'a parameter'" in sender.wait_end()[0].error().message()
    for bad in ("", "[]", '["x", 3]', '["x", "[]"]', '["x", "[\\"yaml\\", \\"\\", null]"]'):
        request, sender = received(PROMPTS["text"](), {"grammar": bad}, outputs=["input_ids"])
        TokenizerPlug(SlowForLongTexts(), KEY, trials=trials).execute([request])
        assert "grammar: given" in sender.wait_end()[0].error().message()


def test_without_trials_a_structure_is_refused() -> None:
    pb_utils.InferenceRequest.models["tokenizer"] = answered_by(TokenizerPlug(SlowForLongTexts(), KEY))
    with closing(plug_of(RecordingService(), lambda _: None)) as plug:
        request, sender = received(PROMPTS["text"]() | {GUIDE_TYPE: text("json")})
        plug.execute([request])
        assert f"{GUIDE_TYPE}: given" in sender.wait_end()[0].error().message()
