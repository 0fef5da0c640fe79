"""NVIDIA's own OpenAI front, unmodified, on this project's model repository: what it demands of a model.

TRITANDEM_NVIDIA_FRONT is the command that runs its main.py under a Python that has its packages and Triton's bindings,
as in NVIDIA's containers; the models themselves run in the Python of these tests. Skipped where there is none.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tritandem.server.command import environment
from tritandem.server.locate import find_install
from tritandem.server.options import ServeOptions

from tests.real_triton.started import demo_model, free_ports
from tools.repository import REPOSITORY

pytestmark = pytest.mark.triton

COMMAND_ENV = "TRITANDEM_NVIDIA_FRONT"
IN_CONTAINERS = Path("/opt/tritonserver/python/openai/openai_frontend/main.py")
READY_S = 300
HELLO = [{"role": "user", "content": "What is the capital of France?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY | {"additionalProperties": False}}}
NAMED = {"type": "function", "function": {"name": "weather"}}
MODELS = pytest.mark.parametrize("model", ["ensemble", "scheduler"])


def command() -> list[str]:
    if given := os.environ.get(COMMAND_ENV):
        return shlex.split(given)
    if not IN_CONTAINERS.is_file():
        pytest.skip(f"NVIDIA's OpenAI front is not here: {COMMAND_ENV} is not set, and there is no {IN_CONTAINERS}")
    return ["python3", str(IN_CONTAINERS)]


class Front:
    def __init__(self, port: int) -> None:
        self._base = f"http://127.0.0.1:{port}"

    def get(self, path: str) -> bytes:
        with urllib.request.urlopen(self._base + path, timeout=10) as reply:
            body: bytes = reply.read()
        return body

    def post(self, path: str, **fields: Any) -> tuple[int, bytes]:
        request = urllib.request.Request(
            f"{self._base}/v1/{path}", json.dumps(fields).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def chat(self, model: str, **fields: Any) -> dict[str, Any]:
        asked = {"model": model, "messages": HELLO, "temperature": 0, "max_tokens": 20}
        status, body = self.post("chat/completions", **asked | fields)
        assert status == 200, body
        return dict(json.loads(body))

    def completion(self, model: str, **fields: Any) -> dict[str, Any]:
        asked = {"model": model, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 6}
        status, body = self.post("completions", **asked | fields)
        assert status == 200, body
        return dict(json.loads(body))


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    words, folder, model = command(), tmp_path_factory.mktemp("nvidia"), demo_model()
    settings, log = folder / "tritandem.toml", folder / "front.log"
    # Chats are rendered there, and its requests say nothing of what becomes of the prompt.
    settings.write_text('[scheduler]\nexclude_input_in_output = "all"\n')
    [port] = free_ports(1)
    models = ["--model-repository", str(REPOSITORY), "--tokenizer", str(model)]
    options = ServeOptions(model, REPOSITORY, engine_config=settings)
    with log.open("w") as output:
        process = subprocess.Popen(
            [*words, *models, "--host", "127.0.0.1", "--openai-port", str(port)],
            env=environment(options, find_install(), os.environ),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    made = Front(port)
    try:
        until_s = time.monotonic() + READY_S
        while True:
            assert process.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < until_s, log.read_text()[-4000:]
            try:
                made.get("/health/ready")
                break
            except OSError:
                time.sleep(0.2)
        yield made
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@MODELS
def test_a_chat_has_the_answer_alone_and_its_usage(front: Front, model: str) -> None:
    said = front.chat(model)
    assert said["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert said["usage"] == {"prompt_tokens": 37, "completion_tokens": 8, "total_tokens": 45}


@MODELS
def test_a_stream_says_the_same(front: Front, model: str) -> None:
    asked = {"model": model, "messages": HELLO, "temperature": 0, "max_tokens": 20, "stream": True}
    status, body = front.post("chat/completions", **asked, stream_options={"include_usage": True})
    events = [line.removeprefix("data: ") for line in body.decode().split("\n\n") if line]
    assert (status, events.pop()) == (200, "[DONE]")
    *chunks, last = map(json.loads, events)
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == "The capital of France is Paris."
    assert last["usage"] == {"prompt_tokens": 37, "completion_tokens": 8, "total_tokens": 45}


@MODELS
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_tool_that_must_be_called_gets_arguments_that_keep_to_its_schema(
    front: Front, model: str, choice: Any
) -> None:
    said = front.chat(model, tools=[WEATHER], tool_choice=choice, max_tokens=60)
    [call] = said["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    arguments = json.loads(call["function"]["arguments"])
    assert list(arguments) == ["city"]
    assert isinstance(arguments["city"], str)


@pytest.mark.parametrize("model", ["ensemble", "scheduler", "tensorrt_llm_bls"])
def test_a_completion_repeats_its_prompt_when_asked_to(front: Front, model: str) -> None:
    assert front.completion(model)["choices"][0]["text"].startswith(" Paris")
    echoed = front.completion(model, echo=True)["choices"][0]["text"]
    assert echoed.startswith("The capital of France is Paris")


def test_every_sampling_field_that_it_sends_is_taken(front: Front) -> None:
    fields = {"top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.5, "seed": 7, "temperature": 1.0}
    first, again = (front.completion("ensemble", **fields, stop=["xyz", "Q"]) for _ in range(2))
    assert first["choices"] == again["choices"]
    stopped = front.completion("ensemble", prompt="1, 2, 3,", max_tokens=20, stop="6")
    assert stopped["choices"][0]["text"] == " 4, 5, "


def test_a_refusal_reaches_the_client_by_name(front: Front) -> None:
    status, body = front.post("completions", model="ensemble", prompt="a", max_tokens=100_000)
    assert status >= 400
    assert b"max_tokens" in body


def test_models_health_and_metrics_are_served(front: Front) -> None:
    listed = {one["id"] for one in json.loads(front.get("/v1/models"))["data"]}
    assert {"ensemble", "scheduler", "tensorrt_llm_bls"} <= listed
    assert b"tritandem_" in front.get("/metrics")
