"""What each process publishes through Triton's metric objects: series of its own, or nothing when switched off."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils
from tritandem.config import TelemetryConfig
from tritandem.contracts.answers import Chunk, Stamps
from tritandem.contracts.errors import InvalidRequest, Outcome
from tritandem.contracts.requests import OutputOptions, PriorityClass
from tritandem.contracts.stream import FinishReason
from tritandem.scheduler.ports import FinishedRequest
from tritandem.telemetry import families as f
from tritandem.telemetry.duration_counts import DurationCounts, LockedDurationCounts
from tritandem.telemetry.publisher import Publisher
from tritandem.telemetry.registry import Registry
from tritandem.telemetry.step_meter import StepMeter
from tritandem.tokenizer import Encoded, TokenizerStats
from tritandem.triton_io.answer.sinks import TritonSink
from tritandem.triton_io.plugs.tokenizer import TokenizerPlug
from tritandem.triton_io.reports.observer import RequestObserver
from tritandem.triton_io.reports.publishing import (
    engine_publisher,
    metrics_port,
    scheduler_publisher,
    tokenizer_publisher,
)
from tritandem.triton_io.reports.timed_text import TimedTextStreams
from tritandem.triton_io.reports.tokenizer_report import TokenizerReport
from tritandem.triton_io.request.decoder import ReturnOptions
from tritandem.triton_io.stub_2_51.finished_calls import FinishedCalls

from tests.triton_io.handed_over import KEY, received, text

ON, OFF = TelemetryConfig(), TelemetryConfig(metrics=False)
REQUEST = FinishedRequest(
    "r", Outcome.COMPLETED, PriorityClass.NORMAL, "", Stamps(1, 2, 3, 4, 5, 6, 7, 8, 9), 3, 5, 0, 2, "engine", ""
)
STATS = TokenizerStats(
    queue_size=2, fast_enabled=True, texts={"fast": 3, "pieces": 1}, tokens={"fast": 30, "pieces": 900}
)


def series() -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    return {(name, labels) for name, by_labels in pb_utils.MetricFamily.values.items() for labels in by_labels}


def value(family: f.Family, **labels: str) -> float:
    return pb_utils.MetricFamily.values[family.name][tuple(sorted(labels.items()))]


def tokenizer(config: TelemetryConfig, name: str) -> Publisher:
    registry = Registry()
    report = TokenizerReport(registry, name, lambda: STATS)
    report.note(Encoded(np.arange(3, dtype=np.int32), "fast", queue_ns=20_000, encode_ns=300_000))
    return tokenizer_publisher(config, report, registry, name)


def engine(config: TelemetryConfig, name: str, gpu_uuid: str = "") -> Publisher:
    meter = StepMeter(name)
    meter.gpu_uuid = gpu_uuid
    meter.launched(400_000, prefills=False)
    meter.decode_step.note(500_000)
    meter.idle_gap.note(20_000)
    return engine_publisher(config, meter)


def scheduler(config: TelemetryConfig, lines: list[str]) -> Publisher:
    registry = Registry()
    observer = RequestObserver(registry, lines.append)
    observer.finished(REQUEST)
    return scheduler_publisher(config, observer, registry, spans=None)


def test_no_two_processes_publish_the_same_series() -> None:
    publishers = {
        "tokenizer 0": tokenizer(ON, "tokenizer_0_0"),
        "tokenizer 1": tokenizer(ON, "tokenizer_0_1"),
        "engine": engine(ON, "engine"),
        "engine 1": engine(ON, "engine_1"),
        "scheduler": scheduler(ON, []),
    }
    owners: Counter[tuple[str, tuple[tuple[str, str], ...]]] = Counter()
    for publisher in publishers.values():
        pb_utils.MetricFamily.values.clear()
        publisher.publish_once()
        assert series()
        owners.update(series())
    assert [one for one, count in owners.items() if count > 1] == []


def test_a_switched_off_server_publishes_nothing_and_writes_its_log_all_the_same() -> None:
    lines: list[str] = []
    for publisher in (tokenizer(OFF, "t"), engine(OFF, "engine", "GPU-1"), scheduler(OFF, lines)):
        publisher.publish_once()
    assert pb_utils.MetricFamily.values == {}
    assert len(lines) == 1


def test_a_tokenizer_tells_its_queue_its_paths_and_its_times() -> None:
    tokenizer(ON, "t").publish_once()
    assert value(f.TOKENIZATION_QUEUE, process="t") == 2
    assert value(f.TOKENIZER_FAST, process="t") == 1
    assert value(f.TOKENIZER_MISMATCHES, process="t") == 0
    assert value(f.TOKENIZED_TOKENS, process="t", path="pieces") == 900
    assert value(f.TOKENIZED_TEXTS, process="t", path="fast") == 3
    waits = pb_utils.MetricFamily.values[f"{f.TOKENIZE_QUEUE_WAIT.name}_bucket"]
    assert waits[(("le", "2e-05"), ("process", "t"))] == 1


def test_only_an_engine_on_a_gpu_tells_what_a_launch_costs() -> None:
    engine(ON, "engine").publish_once()
    launches = f"{f.GRAPH_LAUNCH.name}_count"
    assert launches not in pb_utils.MetricFamily.values
    engine(ON, "engine_1", gpu_uuid="GPU-not-here").publish_once()
    assert pb_utils.MetricFamily.values[launches] == {(("engine", "engine_1"), ("phase", "decode")): 1.0}


def test_the_tokenizers_plug_notes_what_was_encoded_and_not_what_was_refused() -> None:
    class Tokenizer:
        def submit(self, text: str, *, add_special_tokens: bool, max_tokens: int | None) -> Any:
            from concurrent.futures import Future

            future: Future[Any] = Future()
            if text == "refused":
                future.set_exception(InvalidRequest("text_input", text, "another text"))
            else:
                future.set_result(Encoded(np.arange(2, dtype=np.int32), "fast", queue_ns=5, encode_ns=7))
            return future

        def submit_chat(self, messages: Any, *, tools: Any, max_tokens: int | None) -> Any:
            raise AssertionError("no chat here")

        def close(self) -> None: ...

    noted: list[Encoded] = []
    plug = TokenizerPlug(Tokenizer(), KEY, note=noted.append)
    requests = [received({"text_input": text(word)}) for word in ("a", "refused", "b")]
    plug.execute([request for request, _ in requests])
    for _, sender in requests:
        sender.wait_end()
    assert [(one.queue_ns, one.encode_ns) for one in noted] == [(5, 7), (5, 7)]


def test_every_response_of_a_sink_is_timed() -> None:
    times = LockedDurationCounts(f.SEND)
    sender = pb_utils.ResponseSender()
    returns = ReturnOptions(OutputOptions(stream=True))
    sink = TritonSink(sender, returns, ["text_output"], str, FinishedCalls(), times)
    sink.hand_over(lambda: None)
    sink.send(Chunk("a", 1))
    sink.finish(Chunk("b", 1, FinishReason.LENGTH, Outcome.COMPLETED))
    assert sum(times.totals()[0]) == len(sender.responses) == 2


def test_detokenizing_is_timed_a_flush_at_a_time() -> None:
    class Streams:
        def open(self, prompt_ids: Any, stop_words: tuple[str, ...], /) -> str:
            return "state"

        def push(self, states: list[Any], tokens: Any, counts: Any, /) -> list[Any]:
            if not len(tokens):
                raise ValueError("no tokens")
            return [(state, int(count)) for state, count in zip(states, counts, strict=True)]

        def flush(self, state: Any, /) -> str:
            return "rest"

        def stop_word(self, state: Any, /) -> str:
            return ""

    times = DurationCounts(f.DETOKENIZE)
    timed = TimedTextStreams(Streams(), times)
    assert (timed.open(np.zeros(1, np.int32), ()), timed.flush("state")) == ("state", "rest")
    assert timed.push(["a", "b"], np.arange(3, dtype=np.int32), np.array([1, 2])) == [("a", 1), ("b", 2)]
    with pytest.raises(ValueError, match="no tokens"):
        timed.push([], np.zeros(0, np.int32), np.zeros(0, np.int32))
    assert sum(times.totals()[0]) == 1


@pytest.mark.parametrize(
    ("words", "port"),
    [
        (["tritonserver"], 8002),
        (["tritonserver", "--metrics-port=9002", "--http-port=1"], 9002),
        (["tritonserver", "--metrics-port=9002", "--metrics-port=9003"], 9003),
        (["tritonserver", "--metrics-port=none"], 8002),
    ],
)
def test_who_reads_the_metrics_is_no_client(words: list[str], port: int) -> None:
    assert metrics_port("\0".join([*words, ""])) == port
