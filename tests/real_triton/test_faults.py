"""What `tritandem serve` makes of killed processes, vanished clients and a stop in the middle of work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritandem_client import TritandemClientError

from tests.real_triton.readers import WAYS, readers
from tests.real_triton.started import demo_model, free_ports
from tests.soak.memory import stub_pids
from tests.soak.served import Served

pytestmark = pytest.mark.triton

# Which process gets which signal, one after the other: KILL or STOP; a model, tritonserver or guardian.
FAULTS = os.environ.get("TRITANDEM_TEST_FAULTS", "KILL:engine STOP:scheduler STOP:guardian").split()
SIGTERMS = int(os.environ.get("TRITANDEM_TEST_SIGTERMS", "1"))
# Far less than the answers would take, on any CPU.
ENDS_WITHIN_S = 20.0
# How a request may end that runs, or comes, while a process is gone. Without the one that answers, or without Triton,
# nothing is left to send an error: the connection ends. Without the tokenizer or the relay of calls, running answers
# get five seconds; without the relay they end sooner when their engine is asked something.
RUNNING_ENDS = {
    "engine": {"Failed"},
    "engine_calls": {"", "Failed", "ConnectionFailed"},
    "scheduler": {"ConnectionFailed"},
    "tritonserver": {"ConnectionFailed"},
    "guardian": {"ConnectionFailed"},
    "tokenizer": {"", "Failed", "ConnectionFailed"},
}

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
    return Served(free_ports(3), "--model", str(model), "--drain-timeout-s", "120")


def wait_ready(served: Served, wanted: bool, timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while served.ready() is not wanted:
        assert time.monotonic() < end_s, f"readiness is not {wanted} within {timeout_s} s\n" + served.words()
        time.sleep(0.05)


def pid_of(served: Served, name: str) -> int:
    triton = served.triton_pid()
    others = {"tritonserver": triton, "guardian": os.getsid(triton)}
    return others[name] if name in others else stub_pids(triton)[name]


def files_in_shm() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("tritandem_")}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Ready whenever a test begins, whatever the one before has done to it."""
    with served_model() as running:
        yield running
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(60) == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_whichever_process_is_lost_requests_end_and_the_server_comes_back(served: Served, fault: str) -> None:
    number, _, name = fault.partition(":")
    completes = "" in RUNNING_ENDS[name]
    running = readers(served, 1, **({"max_tokens": 40} if completes else {}))
    triton, victim = served.triton_pid(), pid_of(served, name)
    files = [file for file in files_in_shm() if file.startswith(served.shm_prefix())]
    lost_s = time.monotonic()
    os.kill(victim, signal.Signals[f"SIG{number}"])
    wait_ready(served, False, 60.0)
    unready_s = time.monotonic() - lost_s
    for reader in running:
        reader.thread.join(120)
        assert ("" if reader.error is None else type(reader.error).__name__) in RUNNING_ENDS[name]
        if not completes:
            assert reader.ended_s - lost_s < ENDS_WITHIN_S, reader
    served.wait_said("starting Triton", 200)
    gone_s = time.monotonic() - lost_s
    served.wait_said("ready: ", 600)
    ended_s = max(reader.ended_s for reader in running) - lost_s
    back_s = time.monotonic() - lost_s
    print(f"{fault}: unready {unready_s:.1f}, ended {ended_s:.1f}, started {gone_s:.1f}, back {back_s:.1f} s")
    assert not any(Path(f"/proc/{pid}").exists() for pid in (victim, triton))
    assert files
    assert not files_in_shm().intersection(files)
    with served.client() as client:
        assert client.generate("The capital of France is", max_tokens=4).text.startswith(" Paris")


def test_a_stop_under_load_completes_answers_refuses_new_ones_and_exits_0() -> None:
    for _ in range(SIGTERMS):
        with served_model() as served:
            victims = [
                subprocess.Popen(
                    [sys.executable, "-c", VICTIM, protocol, model, served.url(protocol)], stdout=subprocess.PIPE
                )
                for protocol, model in WAYS * 2
            ]
            for victim in victims:
                assert victim.stdout is not None
                assert victim.stdout.readline() == b"streaming\n"
            # Begun last: what they have left to read is what the drain has to wait for.
            running = readers(served, 1, max_tokens=60, sampling_parameters={"ignore_eos": True})
            for victim in victims[::2]:
                victim.kill()
            served.process.send_signal(signal.SIGTERM)
            for victim in victims:
                victim.kill()
                victim.communicate()
            served.wait_said("draining", 60)
            wait_ready(served, False, 60.0)
            for protocol, model in WAYS:
                with served.client(protocol, model) as client, pytest.raises(TritandemClientError):
                    client.generate("too late", max_tokens=1)
            for reader in running:
                reader.thread.join(120)
                assert reader.error is None
                assert reader.tokens == 60
            assert served.process.wait(150) == 0, served.words()
            assert "signal (" not in served.log.read_text(errors="replace")
