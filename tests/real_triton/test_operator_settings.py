"""What an operator sets reaches every process of a real server: where threads run, and where spans go."""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tritandem.config import PLACEMENT_ENV, Config, load_config, with_placement
from tritandem.placement import Plan, plan_here, process_affinities
from tritandem.server import TritonServer
from tritandem.server.health import stub_models

from tests.fakes.otlp_collector import OtlpCollector, Received
from tests.real_triton.raw_client import RawClient, number, text
from tests.real_triton.started import demo_model, start_server
from tools.repository import REPOSITORY

pytestmark = pytest.mark.triton

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACE_PARENT = f"00-{TRACE}-{SPAN}-01"
# Triton traces what comes with a trace context only, and its own spans go nowhere.
TRITON_TRACES = (
    "--trace-config=mode=opentelemetry",
    "--trace-config=level=TIMESTAMPS",
    "--trace-config=rate=0",
    "--trace-config=opentelemetry,url=http://127.0.0.1:9/v1/traces",
)


@dataclass(frozen=True)
class Configured:
    server: TritonServer
    collector: OtlpCollector
    config: Config

    def ask(self, model: str, headers: dict[str, str] | None = None, **fields: object) -> dict[str, object]:
        body = json.dumps({"text_input": "The capital of France is", "max_tokens": 4, **fields}).encode()
        request = urllib.request.Request(
            f"http://{self.server.http_url}/v2/models/{model}/generate",
            body,
            {"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer: dict[str, object] = json.load(response)
        return answer

    def spans(self) -> tuple[Received, list[Received]]:
        """Of the one request that finished: its own and those below it, in order."""
        whole, *parts = sorted(self.collector.spans(6), key=lambda span: (span.start_ns, -span.end_ns))
        assert {part.parent for part in parts} == {whole.span_id}
        return whole, parts


def with_generation_config(folder: Path, values: dict[str, object]) -> Path:
    """The demo model, as if its authors recommended that."""
    folder.mkdir()
    for file in demo_model().glob("*"):
        if file.name != "generation_config.json":
            (folder / file.name).symlink_to(file.resolve())
    (folder / "generation_config.json").write_text(json.dumps(values))
    return folder


def without_prompts(repository: Path) -> Path:
    """The project's own, but for the parameter that leaves the prompt out of every answer."""
    shutil.copytree(REPOSITORY, repository)
    config = repository / "scheduler" / "config.pbtxt"
    said = 'key: "exclude_input_in_output" value { string_value: "%s" }'
    config.write_text(config.read_text().replace(said % "", said % "true"))
    return repository


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Configured]:
    cpus = sorted(os.sched_getaffinity(0))
    file = tmp_path_factory.mktemp("configured") / "tritandem.toml"
    with OtlpCollector() as collector, pytest.MonkeyPatch.context() as patch:
        file.write_text(
            '[scheduler]\ngeneration_config = "auto"\n'
            f'[telemetry]\ntraces_url = "{collector.url}"\nmetrics_period_s = 0.2\n'
            f'[placement]\npolicy = "explicit"\nengine = "{cpus[-1]}"\nscheduler = "{cpus[0]}"\nserver = "{cpus[0]}"\n'
        )
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        model = with_generation_config(file.parent / "model", {"do_sample": True, "temperature": 0.7})
        repository = without_prompts(file.parent / "repository")
        with start_server(model, repository=repository, engine_config=file, extra_flags=TRITON_TRACES) as server:
            yield Configured(server, collector, load_config(file))


def misplaced(server: TritonServer, plan: Plan) -> list[str]:
    """Every thread of the server and of its model processes that is not where the plan wants it."""
    processes = {server.pid: "server"}
    processes |= {pid: "server" if model == "engine_calls" else model for pid, model in stub_models(server.pid).items()}
    assert set(processes.values()) == {"server", "engine", "scheduler", "tokenizer"}
    return [
        f"{component}, thread {name}: {sorted(cpus)}"
        for pid, component in processes.items()
        for name, cpus in process_affinities(pid).values()
        if cpus != plan.cpus_of("engine_host" if name == "engine-core" else component)
    ]


def test_what_auto_makes_of_this_machine_is_where_its_threads_are(server: TritonServer) -> None:
    # The launcher says `off` when another server of this machine was first.
    environment = Path(f"/proc/{server.pid}/environ").read_bytes().decode().split("\0")
    words = next((word.partition("=")[2] for word in environment if word.startswith(f"{PLACEMENT_ENV}=")), "")
    assert misplaced(server, plan_here(with_placement(Config(), words))) == []


def test_every_thread_runs_where_it_was_told_to_also_after_work(configured: Configured) -> None:
    assert "Paris" in str(configured.ask("scheduler", temperature=0.0)["text_output"])
    configured.spans()
    assert misplaced(configured.server, plan_here(configured.config)) == []
    for component in ("engine", "scheduler", "tokenizer"):
        assert f"{component} runs " in configured.server.log()


@pytest.mark.parametrize("model", ["scheduler", "ensemble"])
def test_a_request_continues_the_trace_that_it_names(configured: Configured, model: str) -> None:
    configured.ask(model, traceparent=TRACE_PARENT, temperature=0.0)
    whole, parts = configured.spans()
    assert (whole.trace_id, whole.parent) == (TRACE, SPAN)
    assert [part.name for part in parts] == ["tokenize", "queue", "prefill", "decode", "send"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == 4


@pytest.mark.parametrize("model", ["scheduler", "ensemble"])
def test_a_header_reaches_the_spans_through_tritons_own_trace(configured: Configured, model: str) -> None:
    configured.ask(model, {"traceparent": TRACE_PARENT})
    whole, _ = configured.spans()
    assert whole.trace_id == TRACE
    assert whole.parent not in ("", SPAN)  # Triton's span of this model is between


def test_a_malformed_trace_is_refused_by_name(configured: Configured) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        configured.ask("scheduler", traceparent="nonsense")
    assert "REJECTED_INVALID: traceparent: given 'nonsense', allowed: a W3C" in refused.value.read().decode()
    [whole] = configured.collector.spans(1)
    assert whole.attributes["tritandem.outcome"] == "REJECTED_INVALID"


def test_what_the_models_authors_recommend_holds_unless_a_request_says_otherwise(configured: Configured) -> None:
    assert configured.ask("scheduler", return_seed=True)["used_seed"] != 0, "it was drawn"
    assert configured.ask("ensemble", return_seed=True)["used_seed"] != 0
    greedy = configured.ask("scheduler", return_seed=True, sampling_parameters='{"temperature": 0}')
    assert greedy["used_seed"] == 0


def openai_front(prompt: str, *, stream: bool = False, completion: bool = False, **more: object) -> dict[str, object]:
    """The tensors of NVIDIA's OpenAI front (server/python/openai, `_create_trtllm_generate_request`), each [1, 1]: the
    chat's template is applied there, and only completions say whether the prompt is repeated."""
    arrays: dict[str, object] = {
        "text_input": text(prompt),
        "stream": number(stream, np.bool_),
        "max_tokens": number(8, np.int32),
        "top_p": number(1.0, np.float32),
        "frequency_penalty": number(0.0, np.float32),
        "presence_penalty": number(0.0, np.float32),
        "temperature": number(0.0, np.float32),
        "return_num_input_tokens": number(True, np.bool_),
        "return_num_output_tokens": number(True, np.bool_),
    }
    if completion:
        arrays["exclude_input_in_output"] = number(True, np.bool_)
    return arrays | more


@pytest.mark.parametrize("model", ["scheduler", "ensemble"])
def test_nvidias_openai_front_finds_answers_without_prompts_and_their_usage(configured: Configured, model: str) -> None:
    asked = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    client = RawClient(configured.server.grpc_url)

    def texts_and_usage(arrays: dict[str, object]) -> tuple[str, set[int], int]:
        results = client.results(model, arrays)
        # What it reads: exactly one string in each response, and counts of UINT32.
        strings = [result.as_numpy("text_output") for result in results]
        assert all(one.size == 1 for one in strings)
        prompts = {int(result.as_numpy("num_input_tokens").item()) for result in results}
        answers = sum(int(result.as_numpy("num_output_tokens").item()) for result in results)
        assert {result.as_numpy("num_output_tokens").dtype for result in results} == {np.dtype(np.uint32)}
        return "".join(one.item().decode() for one in strings), prompts, answers

    chat, streamed = texts_and_usage(openai_front(asked)), texts_and_usage(openai_front(asked, stream=True))
    assert chat == streamed
    assert chat[0].startswith("The capital of France is")
    assert (len(chat[1]), chat[2]) == (1, 8)
    completion = openai_front("1, 2, 3,", completion=True, stop_words=text("6", "9"), seed=number(4, np.uint64))
    assert texts_and_usage(completion)[0] == " 4, 5, "
    schema = {"type": "object", "properties": {"n": {"enum": [7, 8]}}, "required": ["n"], "additionalProperties": False}
    guided = {"guided_decoding_guide_type": text("json_schema"), "guided_decoding_guide": text(json.dumps(schema))}
    called = texts_and_usage(openai_front(asked, max_tokens=number(40, np.int32), **guided))[0]
    assert json.loads(called)["n"] in (7, 8), "a function that must be called"
