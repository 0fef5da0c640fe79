"""Where the threads of a real server may run, read back from the kernel."""

from __future__ import annotations

import os

import pytest
from conftest import start_server
from tritandem.config import Config, placement_from_words
from tritandem.placement import Plan, plan_here, process_affinities
from tritandem.server import TritonServer
from tritandem.server.health import stub_models
from tritandem_client import Client

pytestmark = pytest.mark.triton


def misplaced(server: TritonServer, plan: Plan) -> list[str]:
    """Every thread of the server and of its model processes that is not where the plan wants it."""
    processes = {server.pid: "server"}
    processes |= {pid: "server" if model == "engine_calls" else model for pid, model in stub_models(server.pid).items()}
    assert set(processes.values()) == {"server", "engine", "scheduler", "tokenizer"}
    return [
        f"{component}, thread {name}: {sorted(cpus)}"
        for pid, component in processes.items()
        for name, cpus in process_affinities(pid).values()
        if cpus != plan.cpus_of("engine_host" if name.startswith("engine-core") else component)
    ]


def test_what_auto_makes_of_this_machine_is_where_its_threads_are(server: TritonServer) -> None:
    assert misplaced(server, plan_here(Config())) == []


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU leaves nothing to choose")
def test_every_thread_runs_where_it_was_told_to_also_after_work() -> None:
    first, second = sorted(os.sched_getaffinity(0))[:2]
    words = f"engine={second} scheduler={first} tokenizer={first},{second} server={first}"
    with start_server(placement=words) as server, Client(server.grpc_url) as client:
        assert "Paris" in client.generate("The capital of France is", max_tokens=4).text
        assert misplaced(server, plan_here(Config(placement=placement_from_words(words)))) == []
        for component in ("engine", "scheduler", "tokenizer"):
            assert f"{component} runs on CPUs" in server.log()
