"""A chat is parsed once, by the tokenizer; the scheduler passes it on as it came, and both ways refuse it alike."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import triton_python_backend_utils as pb_utils
from tritandem.tokenizer import TextTokenizer
from tritandem.triton_io.hops import handover
from tritandem.triton_io.plugs.scheduler import SchedulerPlug
from tritandem.triton_io.plugs.tokenizer import TokenizerPlug
from tritandem.triton_io.request.decoder import decode
from tritandem.triton_io.request.prompt_source import MAX_CHAT_CHARS
from tritandem.triton_io.request.tensor_values import Inputs

from tests.tokenizer.byte_models import load
from tests.triton_io.handed_over import KEY, answered_by, received, text
from tests.triton_io.test_scheduler_plug import RecordingService, plug_of

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}({{ tool.function.parameters | tojson }}) {% endfor %}"
    "{% for message in messages %}{{ message.content }}|{% endfor %}"
)
HI = {"role": "user", "content": "hi"}
WRONG = {
    "no JSON": ("[{", "malformed JSON"),
    "no list": ("{}", "a non-empty JSON list"),
    "nothing": ("[]", "a non-empty JSON list"),
    "no message": (json.dumps([HI, "hi"]), "a non-empty JSON list"),
    "too many": (json.dumps([HI] * 10_001), "given '10001 messages', allowed: at most 10000"),
    "many digits": ("[" + "1" * 5000 + "]", "an integer of 5000 digits"),
    "no role": (json.dumps([HI, HI, HI, {"content": "hi"}]), r"messages\[3\].role"),
    "no content": (json.dumps([HI, HI, HI, {"role": "user", "content": 7}]), r"messages\[3\].content: given 7"),
    "half a character": (json.dumps([{"role": "user", "content": "\ud800"}]), "messages"),
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": "number"}}}
WRONG_TOOLS = {
    "no JSON": ("[{", "tools: given .malformed JSON"),
    "no list": (json.dumps(TOOL), "tools: given .*a JSON list of"),
    "deep": (
        '[{"type": "function", "function": {"name": "a", "parameters": ' + '{"a":' * 900 + "1" + "}" * 902 + "]",
        r"tools\[0\]: given .more than 64 levels",
    ),
    "too many": (json.dumps([TOOL] * 257), "tools: given '257 tools', allowed: at most 256"),
    "many digits": ("[" + "1" * 5000 + "]", "tools: given .an integer of 5000 digits"),
    "a text": (json.dumps([TOOL, "add"]), r"tools\[1\]: given 'add'"),
    "another kind": (json.dumps([{"type": "web_search"}]), r"tools\[0\]: given"),
    "no function": (json.dumps([{"type": "function"}]), r"tools\[0\].function: given None"),
    "no name": (json.dumps([{"function": {"name": ""}}]), r"tools\[0\].function.name: given ''"),
    "a wrong description": (json.dumps([{"function": {"name": "a", "description": 7}}]), r"description: given 7"),
    "no schema": (
        json.dumps([{"function": {"name": "a", "parameters": []}}]),
        r"tools\[0\].function.parameters: given",
    ),
}
NOT_EVEN_A_TEXT: dict[str, Any] = {"a number": 7, "half a character": "\ud800", "long": "x" * (MAX_CHAT_CHARS + 1)}


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextTokenizer]:
    tokenizer = load(tmp_path_factory.mktemp("bytes"), TEMPLATE)
    yield tokenizer
    tokenizer.close()


@pytest.fixture
def tokenizer(byte_tokenizer: TextTokenizer) -> TokenizerPlug:
    plug = TokenizerPlug(byte_tokenizer, KEY)
    pb_utils.InferenceRequest.models["tokenizer"] = answered_by(plug)
    return plug


@pytest.fixture
def service() -> RecordingService:
    return RecordingService()


@pytest.fixture
def scheduler(service: RecordingService) -> Iterator[SchedulerPlug]:
    with closing(plug_of(service, queue.Queue().put)) as plug:
        yield plug


def ask(scheduler: SchedulerPlug, chat: object, arrays: dict[str, Any] | None = None, **more: object) -> Any:
    request, sender = received({"text_input": text("")} | (arrays or {}), {"messages": chat, **more})
    scheduler.execute([request])
    return sender


def by_the_ensemble(tokenizer: TokenizerPlug, chat: object, **more: object) -> dict[str, Any]:
    """What the ensemble carries from the tokenizer to the scheduler."""
    parameters = {"messages": chat, **more}
    request, sender = received({"text_input": text("")}, parameters, outputs=list(handover.OUTPUTS))
    tokenizer.execute([request])
    arrays: dict[str, Any] = sender.wait_end()[0].arrays()
    return arrays


@pytest.mark.parametrize("way", ["direct", "ensemble"])
def test_the_tokenizers_ids_of_a_chat_reach_the_service(
    tokenizer: TokenizerPlug, scheduler: SchedulerPlug, service: RecordingService, way: str
) -> None:
    chat = json.dumps([HI, HI])
    ask(scheduler, chat, by_the_ensemble(tokenizer, chat) if way == "ensemble" else None)
    assert service.arrived.acquire(timeout=5.0)
    assert bytes(service.taken[0][0].input_ids.tolist()) == b"hi|hi|"


@pytest.mark.parametrize("name", WRONG)
def test_both_ways_refuse_a_chat_in_the_tokenizers_words(
    tokenizer: TokenizerPlug, scheduler: SchedulerPlug, service: RecordingService, name: str
) -> None:
    chat, words = WRONG[name]
    direct = ask(scheduler, chat).wait_end()[0].error()
    carried = ask(scheduler, chat, by_the_ensemble(tokenizer, chat)).wait_end()[0].error()
    assert direct.message() == carried.message()
    assert direct.code() == carried.code() == "INVALID_ARG"
    assert re.search(words, direct.message())
    assert not service.taken


@pytest.mark.parametrize("way", ["direct", "ensemble"])
def test_the_template_shows_the_tools(
    tokenizer: TokenizerPlug, scheduler: SchedulerPlug, service: RecordingService, way: str
) -> None:
    chat, tools = json.dumps([HI]), json.dumps([TOOL])
    ask(scheduler, chat, by_the_ensemble(tokenizer, chat, tools=tools) if way == "ensemble" else None, tools=tools)
    assert service.arrived.acquire(timeout=5.0)
    assert bytes(service.taken[0][0].input_ids.tolist()) == b'add({"a": "number"}) hi|'


@pytest.mark.parametrize("name", WRONG_TOOLS)
def test_both_ways_refuse_tools_by_name(
    tokenizer: TokenizerPlug, scheduler: SchedulerPlug, service: RecordingService, name: str
) -> None:
    tools, words = WRONG_TOOLS[name]
    chat = json.dumps([HI])
    direct = ask(scheduler, chat, tools=tools).wait_end()[0].error()
    carried = ask(scheduler, chat, by_the_ensemble(tokenizer, chat, tools=tools), tools=tools).wait_end()[0].error()
    assert direct.message() == carried.message()
    assert direct.code() == carried.code() == "INVALID_ARG"
    assert re.search(words, direct.message())
    assert not service.taken


@pytest.mark.parametrize(
    ("tools", "words"),
    [
        (7, "tools: given 'int'"),
        ("\ud800", "tools: given 'half"),
        ("x" * ((1 << 20) + 1), "tools: given '1048577 char"),
    ],
)
def test_tools_that_could_not_be_passed_on_are_refused_at_once(
    scheduler: SchedulerPlug, tools: Any, words: str
) -> None:
    assert words in ask(scheduler, json.dumps([HI]), tools=tools).wait_end()[0].error().message()


def test_tools_without_a_chat_are_refused(scheduler: SchedulerPlug) -> None:
    request, sender = received({"text_input": text("hi")}, {"tools": "[]"})
    scheduler.execute([request])
    assert "REJECTED_INVALID: tools: given 'without messages'" in sender.wait_end()[0].error().message()


@pytest.mark.parametrize("name", WRONG)
def test_the_scheduler_decodes_whatever_stands_in_a_chat(name: str) -> None:
    chat, _ = WRONG[name]
    assert decode("id", Inputs({"text_input": text("")}), {"messages": chat}, 0).prompt.chat == chat


@pytest.mark.parametrize("name", NOT_EVEN_A_TEXT)
def test_what_could_not_be_passed_on_is_refused_at_once(scheduler: SchedulerPlug, name: str) -> None:
    assert (
        ask(scheduler, NOT_EVEN_A_TEXT[name])
        .wait_end()[0]
        .error()
        .message()
        .startswith("REJECTED_INVALID: messages: given ")
    )


def test_the_scheduler_has_no_code_that_parses_a_chat() -> None:
    code = """
import sys
from tests.fakes import triton_python_backend_utils
sys.modules["triton_python_backend_utils"] = triton_python_backend_utils
import tritandem.triton_io.plugs.scheduler_start
print("tritandem.triton_io.request.chat_messages" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
