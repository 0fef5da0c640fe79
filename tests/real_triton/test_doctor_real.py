"""The doctor on a real server: it names what was planted. And every metric that a CPU can have is there.

One server for all, with few KV blocks, two tokenizer processes without a fast path and a short period of the metrics.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritandem.cli.doctor.sample import Sample, fetch
from tritandem.server import TritonServer
from tritandem.telemetry import families as f

from tests.real_triton.raw_client import RawClient, number, tensor, text
from tests.real_triton.started import start_server
from tests.soak.memory import children

pytestmark = pytest.mark.triton

SETTINGS = """
[engine]
device = "cpu"
num_blocks = 48
max_sequences = 8
[scheduler]
dynamic_batch = false
[tokenizer]
fast = false
[telemetry]
metrics_period_s = 0.5
"""
SECONDS = "3"
# What only an engine on a GPU has.
GPU_ONLY = {family for family in f.FAMILIES if family.name.startswith("tritandem_gpu_")} | {
    f.GRAPH_LAUNCH,
    f.LAUNCH_SKEW,
    f.STAGING_BYTES,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    settings = tmp_path_factory.mktemp("doctor") / "settings.toml"
    settings.write_text(SETTINGS)
    with start_server(engine_config=settings, tokenizer_instances=2) as running:
        yield running


def doctor(server: TritonServer) -> tuple[dict[str, Any], set[str]]:
    """The document, and every verdict in it. The exit code is the one that it names."""
    words = [sys.executable, "-m", "tritandem.cli", "doctor", "--url", server.metrics_url, "--json"]
    done = subprocess.run([*words, "--seconds", SECONDS], capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    assert done.returncode == found["exit_code"], done.stderr
    return found, {found["verdict"], *(other["verdict"] for other in found["also"])}


def wait_for(server: TritonServer, what: object, condition: Callable[[Sample], bool], timeout_s: float = 120) -> Sample:
    """`what` is named as it is when the time is over."""
    end_s = time.monotonic() + timeout_s
    while not condition(sample := fetch(server.metrics_url)):
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.2)
    return sample


class Asker:
    """One client on the model that notices when it goes. It asks again as soon as an answer has ended, so that what it
    asks of the server lasts until `close`, however fast the server is. No two prompts share a prefix."""

    def __init__(self, server: TritonServer, number_: int, prompt: str, max_tokens: int) -> None:
        self.error: Exception | None = None
        self._turns = (f"{number_}.{turn} {prompt}" for turn in itertools.count())
        self._wanted = {
            "sampling_parameters": text('{"ignore_eos": true}'),
            "stream": number(True, np.bool_),
            "max_tokens": number(max_tokens, np.int32),
        }
        self._closed, self._lock = False, threading.Lock()
        self._connection = grpcclient.InferenceServerClient(server.grpc_url)
        self._connection.start_stream(self._hear)
        self._ask()

    def _ask(self) -> None:
        arrays = {"text_input": text(next(self._turns)), **self._wanted}
        inputs = [tensor(name, array) for name, array in arrays.items()]
        self._connection.async_stream_infer("scheduler", inputs, enable_empty_final_response=True)

    def _hear(self, result: Any, error: Exception | None) -> None:
        """On the connection's thread."""
        with self._lock:
            if self._closed:
                return
            if error is not None:
                self.error = error
            elif result.get_response().parameters["triton_final_response"].bool_param:
                self._ask()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._connection.stop_stream(cancel_requests=True)
        self._connection.close()


@contextmanager
def streams(server: TritonServer, count: int, prompt: str, max_tokens: int) -> Iterator[None]:
    """So many clients, each with an answer at any time."""
    askers = [Asker(server, i, prompt, max_tokens) for i in range(count)]
    try:
        yield
    finally:
        for asker in askers:
            asker.close()
        wait_for(server, "all streams have ended", lambda sample: sample.total(f.REQUESTS_RUNNING.name) == 0)
    assert [asker.error for asker in askers if asker.error] == []


def run_s(pid: int) -> float:
    """CPU time of a process's main thread."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


@contextmanager
def one_core_with_busy_neighbours(server: TritonServer) -> Iterator[None]:
    """Every thread of the server shares one core with two loops."""
    core = min(os.sched_getaffinity(0))
    pids = [server.pid, *children(server.pid)]
    threads = [int(path.name) for pid in pids for path in Path(f"/proc/{pid}/task").iterdir()]
    before = {thread: os.sched_getaffinity(thread) for thread in threads}
    spin = f"import os; os.sched_setaffinity(0, [{core}])\nwhile True: pass"
    neighbours = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    try:
        for thread in threads:
            os.sched_setaffinity(thread, [core])
        end_s = time.monotonic() + 60
        while (
            min(run_s(neighbour.pid) for neighbour in neighbours) < 0.5
        ):  # Python takes a while to start in this crowd
            assert time.monotonic() < end_s, "the neighbours do not run"
            time.sleep(0.05)
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
        for thread, cores in before.items():
            if Path(f"/proc/{thread}").exists():
                os.sched_setaffinity(thread, cores)


def test_a_server_without_requests_is_idle(server: TritonServer) -> None:
    found, _ = doctor(server)
    assert (found["verdict"], found["exit_code"]) == ("idle", 0)


def test_a_server_whose_cores_were_taken_away_is_short_of_them(server: TritonServer) -> None:
    with streams(server, 2, "1, 2, 3, 4,", 350):
        # Threads that an engine starts with its first work would escape a mask that was set before.
        wait_for(server, "both decode", lambda sample: sample.total(f.ENGINE_RUNNING.name) == 2)
        with one_core_with_busy_neighbours(server):
            found, _ = doctor(server)
    assert (found["verdict"], found["exit_code"]) == ("short of cores", 4), json.dumps(found)
    assert "most of it the engine" in found["because"]


def test_a_client_that_reads_nothing_is_seen(server: TritonServer) -> None:
    # A kilobyte and more for each token, however many come in one response.
    sampling = '{"ignore_eos": true, "logprobs": 20}'
    wanted = {"text_input": "1, 2, 3,", "max_tokens": 60, "stream": True, "sampling_parameters": sampling}
    wanted["return_logprobs"] = True
    body = json.dumps(wanted).encode()
    host, port = server.http_url.split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)  # before connecting: it bounds the window
        client.connect((host, int(port)))
        head = (
            f"POST /v2/models/ensemble/generate_stream HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        client.sendall(head.encode() + body)
        wait_for(server, "the client's window closes", lambda sample: sample.total(f.CLIENTS_STALLED.name) == 1)
        found, verdicts = doctor(server)
    assert "delivery-bound" in verdicts, found
    assert found["signals"]["unsent_bytes"] > 0


def test_an_engine_without_blocks_for_those_who_wait_is_memory_bound(server: TritonServer) -> None:
    with streams(server, 24, "word " * 90, 60):  # four or so at a time fill the pool
        wait_for(
            server,
            "requests wait for blocks",
            lambda sample: sample.total(f.KV_BLOCKS_USED.name) >= 29 and sample.total(f.REQUESTS_WAITING.name) > 0,
        )
        found, verdicts = doctor(server)
    assert "memory-bound" in verdicts, found
    # On a machine that is short of cores as well, that comes first.
    assert found["verdict"] == "memory-bound" or "short of cores" in verdicts, found


def test_a_saturated_engine_is_engine_bound(server: TritonServer) -> None:
    """Every slot is taken and more wait, with blocks to spare."""
    # More wait than can be taken at once.
    with streams(server, 24, "1, 2, 3,", 40):
        wait_for(
            server,
            "every slot is taken and requests wait",
            lambda sample: sample.total(f.ENGINE_RUNNING.name) == 8 and sample.total(f.REQUESTS_WAITING.name) >= 3,
        )
        found, verdicts = doctor(server)
    assert "engine-bound" in verdicts, found
    assert found["exit_code"] >= 3
    assert "memory-bound" not in verdicts, found
    assert found["verdict"] == "engine-bound" or "short of cores" in verdicts, found


@contextmanager
def long_prompts(server: TritonServer, clients: int) -> Iterator[None]:
    """So many clients that send one text after the other, each new, which the engine has no room for: all that they
    cost is tokenizing."""
    stop = threading.Event()

    def ask(client: int) -> None:
        connection = http.client.HTTPConnection(server.http_url, timeout=60)
        for turn in itertools.count():
            if stop.is_set():
                break
            prompt = " ".join(f"{word}{client}x{turn}" for word in range(700))
            connection.request("POST", "/v2/models/ensemble/generate", json.dumps({"text_input": prompt}))
            answers.append(connection.getresponse().read())
        connection.close()

    answers: list[bytes] = []
    threads = [threading.Thread(target=ask, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert answers
    assert {b"REJECTED_INVALID" in answer for answer in answers} == {True}, answers[0]


def test_texts_that_queue_for_the_tokenizer_make_it_the_bottleneck(server: TritonServer) -> None:
    def queued(sample: Sample) -> bool:
        waiting = sample.total("nv_inference_pending_request_count", model="tokenizer")
        return sample.total(f.TOKENIZATION_QUEUE.name) + waiting >= 4

    with long_prompts(server, 16):
        wait_for(server, "texts queue", queued)
        found, _ = doctor(server)
    assert (found["verdict"], found["exit_code"]) == ("CPU-bound tokenization", 4), found


def test_every_family_that_a_cpu_can_have_is_published(server: TritonServer) -> None:
    client = RawClient(server.grpc_url)
    asked = {"text_input": text("Hello"), "max_tokens": number(2, np.int32), "stream": number(True, np.bool_)}
    for _ in range(4):
        client.answer("ensemble", asked)
    client.answer("ensemble", asked | {"guided_decoding_guide_type": text("json")})
    wanted = [
        f"{family.name}_count" if family.kind is f.Kind.HISTOGRAM else family.name
        for family in f.FAMILIES
        if family not in GPU_ONLY
    ]
    missing = set(wanted)

    def all_there(sample: Sample) -> bool:
        missing.intersection_update(name for name in wanted if not sample.has(name))
        return not missing

    found = wait_for(server, missing, all_there, timeout_s=30)
    assert not [family.name for family in GPU_ONLY if found.has(family.name) or found.has(f"{family.name}_count")]


def test_processes_that_publish_the_same_family_keep_their_own_series(server: TritonServer) -> None:
    found = fetch(server.metrics_url)
    assert set(found.by(f.PROCESS_CPU.name, "component")) == {"tokenizer", "scheduler", "engine", "server"}
    assert set(found.by(f.PROCESS_CPU.name, "process")) == {
        "tokenizer_0_0", "tokenizer_0_1", "scheduler", "engine", "tritonserver",
    }  # fmt: skip
    assert set(found.by(f.TOKENIZER_FAST.name, "process")) == {"tokenizer_0_0", "tokenizer_0_1"}
    for series in found.series[f.PROCESS_CPU.name]:
        assert series.value > 0, series
