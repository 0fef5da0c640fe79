"""What `tritandem serve` makes of killed processes, vanished clients and a stop in the middle of work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from served import WAYS, Served, readers
from server_memory import stub_pids
from started import demo_model, free_ports
from tritandem_client import TritandemClientError

pytestmark = pytest.mark.triton

KILLED_MODELS = os.environ.get("TRITANDEM_TEST_KILLED_MODELS", "engine").split(",")
SIGTERMS = int(os.environ.get("TRITANDEM_TEST_SIGTERMS", "1"))
ENDS_WITHIN_S = 5.0
# How a request ends that runs, or comes, while a model's process is gone. Without the scheduler nothing is left to
# send an error: the connection ends. Without the tokenizer, running answers complete.
RUNNING_ENDS = {"engine": "Failed", "engine_calls": "Failed", "scheduler": "ConnectionFailed", "tokenizer": ""}

VICTIM = """
import sys
from tritandem_client import Client
protocol, model, url = sys.argv[1:]
with Client(url, protocol=protocol, model=model) as client:
    for chunk in client.stream("1, 2, 3, 4,", max_tokens=2000, deadline_ms=15_000):
        print("streaming", flush=True)
"""


def served_model() -> Served:
    model = demo_model()
    if not (model / "config.json").is_file():
        pytest.skip(f"no demo model in {model}")
    return Served(model, free_ports(3), "--drain-timeout-s", "120")


def wait_ready(served: Served, wanted: bool, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while served.ready() is not wanted:
        assert time.monotonic() < end_s, f"readiness is not {wanted} within {timeout_s} s\n" + "\n".join(served.lines)
        time.sleep(0.05)


def test_whichever_process_is_killed_requests_end_and_the_server_comes_back() -> None:
    with served_model() as served:
        for model in KILLED_MODELS:
            bounded = {"max_tokens": 40} if RUNNING_ENDS[model] == "" else {}
            running = readers(served, 1, **bounded)
            os.kill(stub_pids(served.triton_pid())[model], signal.SIGKILL)
            killed_s = time.monotonic()
            wait_ready(served, False, 10.0)
            for reader in running:
                reader.thread.join(120)
                assert ("" if reader.error is None else type(reader.error).__name__) == RUNNING_ENDS[model]
                if RUNNING_ENDS[model]:
                    assert reader.ended_s - killed_s < ENDS_WITHIN_S, reader
            served.wait_said("ready: ", 600)
            with served.client() as client:
                assert client.generate("The capital of France is", max_tokens=4).text.startswith(" Paris")
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0


def test_a_stop_under_load_completes_answers_refuses_new_ones_and_exits_0() -> None:
    for _ in range(SIGTERMS):
        with served_model() as served:
            victims = [
                subprocess.Popen(
                    [sys.executable, "-c", VICTIM, protocol, model, served.url(protocol)], stdout=subprocess.PIPE
                )
                for protocol, model in WAYS * 2
            ]
            running = readers(served, 1, max_tokens=40, sampling_parameters={"ignore_eos": True})
            for victim in victims:
                assert victim.stdout is not None
                assert victim.stdout.readline() == b"streaming\n"
            for victim in victims[::2]:
                victim.kill()
            served.process.send_signal(signal.SIGTERM)
            for victim in victims:
                victim.kill()
                victim.communicate()
            served.wait_said("draining", 10)
            wait_ready(served, False, 10.0)
            for protocol, model in WAYS:
                with served.client(protocol, model) as client, pytest.raises(TritandemClientError):
                    client.generate("too late", max_tokens=1)
            for reader in running:
                reader.thread.join(120)
                assert reader.error is None
                assert reader.tokens == 40
            assert served.process.wait(150) == 0, "\n".join(served.lines)
            assert "signal (" not in served.log()
