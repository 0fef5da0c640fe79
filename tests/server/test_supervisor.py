"""Signals, restarts and exit codes of a server in the foreground."""

from __future__ import annotations

import os
import signal
import socket
import threading
import urllib.request
from collections.abc import Callable

import pytest
from tritandem.host import Refusal
from tritandem.server import TritonServer, supervisor
from tritandem.server.backoff import RestartPolicy, delay_s, restarts_in_a_row
from tritandem.server.front_workers import FrontOptions, FrontWorkers
from tritandem.server.health import stub_models
from tritandem.server.supervisor import NOTHING_NEW_S, Supervisor, Trouble, lost_stubs

from tests.fakes.ports import free_ports

QUICK = RestartPolicy(max_restarts=2, first_delay_s=0.01, max_delay_s=0.02)


@pytest.fixture
def said() -> list[str]:
    return []


def each_time_ready(*actions: Callable[[TritonServer], None]) -> Callable[[TritonServer], None]:
    """An `on_ready` that does the n-th action when the server is ready for the n-th time."""
    left = list(actions)
    return lambda server: left.pop(0)(server)


def stop(*signals: int) -> Callable[[TritonServer], None]:
    """Send this process the signals, as a terminal or an init system would."""
    return lambda server: [signal.raise_signal(number) for number in signals] and None


def crash(server: TritonServer) -> None:
    os.kill(server.pid, signal.SIGUSR1)


def lose_a_stub(server: TritonServer) -> None:
    os.kill(server.pid, signal.SIGUSR2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_and_ends_with_0(make_server, said, number) -> None:
    code = Supervisor(lambda: make_server({"drain_s": 0.3}), QUICK, said.append).run(stop(number))
    assert code == 0
    assert said[-1] == "stopped"


def test_a_second_signal_cuts_the_drain_short(make_server, said) -> None:
    run = Supervisor(lambda: make_server({"drain_s": 100}), QUICK, said.append).run
    assert run(stop(signal.SIGINT, signal.SIGTERM)) == 130


def test_a_signal_while_loading_ends_with_0(make_server, said) -> None:
    def make() -> TritonServer:
        signal.raise_signal(signal.SIGTERM)
        return make_server({"ready_after_s": 0.5})

    assert Supervisor(make, QUICK, said.append).run(each_time_ready()) == 0


def test_signals_are_handled_as_before_afterwards(make_server, said) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    Supervisor(make_server, QUICK, said.append).run(stop(signal.SIGTERM))
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_that_a_librarys_thread_receives_is_seen(make_server, said) -> None:
    idle = threading.Event()
    library = threading.Thread(target=idle.wait)
    library.start()

    def make() -> TritonServer:
        signal.pthread_kill(library.ident, signal.SIGTERM)
        return make_server({"ready_after_s": 0.5})

    try:
        assert Supervisor(make, QUICK, said.append).run(each_time_ready()) == 0
    finally:
        idle.set()
        library.join()


def test_a_server_that_never_becomes_ready_is_not_restarted(make_server, said) -> None:
    made = []

    def make() -> TritonServer:
        made.append(make_server({"fail": "no such model"}))
        return made[-1]

    assert Supervisor(make, QUICK, said.append).run(each_time_ready()) == 1
    assert len(made) == 1
    assert any("no such model" in line for line in said)


def test_a_server_that_dies_is_restarted_until_patience_ends(make_server, said) -> None:
    code = Supervisor(make_server, QUICK, said.append).run(crash)
    assert code == 1
    assert sum(line.startswith("restart ") for line in said) == 2
    assert said.count("tritonserver was ended by SIGSEGV") == 3


def test_a_server_that_has_been_ready_is_restarted_for_ever_unless_a_limit_is_set(make_server, said) -> None:
    for_ever = RestartPolicy(first_delay_s=0.01, max_delay_s=0.02)
    crashes = [crash] * 7
    assert Supervisor(make_server, for_ever, said.append).run(each_time_ready(*crashes, stop(signal.SIGTERM))) == 0
    assert "restart 7 in 0 s" in said
    assert all(
        (pause := delay_s(RestartPolicy(), failures)) is not None and pause <= 30.0 for failures in range(1, 5000)
    )


def test_a_server_that_dies_once_serves_again(make_server, said) -> None:
    assert Supervisor(make_server, QUICK, said.append).run(each_time_ready(crash, stop(signal.SIGTERM))) == 0


def test_what_stands_in_the_way_of_a_restart_may_go(make_server, said) -> None:
    [port] = free_ports(1)
    holder = socket.create_server(("127.0.0.1", port))
    made = []

    def make() -> TritonServer:
        made.append(make_server({}, openai_port=port))
        if len(made) == 2:
            holder.bind(("127.0.0.1", port))
            holder.listen()
        if len(made) == 3:
            holder.close()
        return made[-1]

    with pytest.raises(Refusal, match=f"port {port} "):  # of the first start
        Supervisor(lambda: make_server({}, openai_port=port), QUICK, said.append).run(each_time_ready())
    holder.close()
    holder = socket.socket()
    assert Supervisor(make, QUICK, said.append).run(each_time_ready(crash, stop(signal.SIGTERM))) == 0
    assert any(line.startswith(f"port {port} ") for line in said)
    assert len(made) == 3


def test_a_lost_model_process_means_a_restart(make_server, said, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "STUB_GRACE_S", 0.2)
    assert Supervisor(make_server, QUICK, said.append).run(each_time_ready(lose_a_stub, stop(signal.SIGTERM))) == 0
    assert "1 of 2 model processes have died" in said


def test_a_model_process_that_was_stopped_means_a_restart(make_server, said, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "STUB_GRACE_S", 0.2)

    def stop_a_stub(server: TritonServer) -> None:
        os.kill(next(iter(stub_models(server.pid))), signal.SIGSTOP)

    def make() -> TritonServer:
        return make_server(say=said.append)

    assert Supervisor(make, QUICK, said.append).run(each_time_ready(stop_a_stub, stop(signal.SIGTERM))) == 0
    assert [line for line in said if "killed" in line or "died" in line] == [
        "the process of  has been stopped by a signal: killed",
        "1 of 2 model processes have died",
    ]


@pytest.mark.parametrize("which", ["server", "guardian"])
def test_a_stopped_server_or_guardian_means_a_restart(make_server, said, which: str) -> None:
    def stop_it(server: TritonServer) -> None:
        os.kill(server.pid if which == "server" else os.getsid(server.pid), signal.SIGSTOP)

    def make() -> TritonServer:
        return make_server(say=said.append)

    assert Supervisor(make, QUICK, said.append).run(each_time_ready(stop_it, stop(signal.SIGTERM))) == 0
    assert "tritonserver was ended by SIGKILL" in said


def test_a_signal_cuts_the_drain_of_a_sick_server_short_and_ends_with_0(make_server, said, monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "STUB_GRACE_S", 0.2)

    def say(line: str) -> None:
        said.append(line)
        if "have died" in line:
            signal.raise_signal(signal.SIGTERM)

    def make() -> TritonServer:
        return make_server({"drain_s": 100}, drain_timeout_s=100.0)

    assert Supervisor(make, QUICK, say).run(lose_a_stub) == 0
    assert said[-1].startswith("restart 1 of 2")


def test_without_the_answering_process_nothing_is_waited_for_and_while_nothing_new_is_served_not_for_long() -> None:
    one = ["tokenizer", "scheduler", "engine", "engine_calls"]
    assert lost_stubs(["engine"], one, 30.0) == Trouble("1 of 4 model processes have died: engine", 30.0)
    assert lost_stubs(["scheduler", "engine"], one, 30.0).patience_s == 0.0
    for model in ("tokenizer", "engine_calls"):
        assert lost_stubs([model], one, 30.0).patience_s == NOTHING_NEW_S
        assert lost_stubs([model], one, 2.0).patience_s == 2.0
    two = [*one, "other", "other_calls"]
    assert lost_stubs(["engine_calls"], two, 30.0).patience_s == 30.0
    assert lost_stubs(["engine_calls", "other_calls"], two, 30.0).patience_s == NOTHING_NEW_S


def test_back_off_doubles_up_to_its_bound_and_then_gives_up() -> None:
    policy = RestartPolicy(max_restarts=4, first_delay_s=1.0, max_delay_s=5.0)
    assert [delay_s(policy, failures) for failures in range(1, 6)] == [1.0, 2.0, 4.0, 5.0, None]


def test_a_long_good_run_starts_the_count_anew() -> None:
    policy = RestartPolicy(stable_after_s=60.0)
    assert restarts_in_a_row(policy, 3, ran_s=59.0) == 4
    assert restarts_in_a_row(policy, 3, ran_s=60.0) == 1


def test_no_restart_means_none() -> None:
    assert delay_s(RestartPolicy(max_restarts=0), 1) is None


def test_the_openai_api_comes_and_goes_with_the_server(make_server, said) -> None:
    front = FrontWorkers(FrontOptions(("tiny",), workers=1), said.append)
    [port] = free_ports(1)
    pids = []

    def live(server: TritonServer) -> None:
        [pid] = front.pids()
        pids.append(pid)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live", timeout=10) as response:
            assert response.status == 200

    def make() -> TritonServer:
        return make_server({}, openai_port=port)

    def crash_when_live(server: TritonServer) -> None:
        live(server)
        crash(server)

    def stop_when_live(server: TritonServer) -> None:
        live(server)
        signal.raise_signal(signal.SIGTERM)

    run = Supervisor(make, QUICK, said.append, front).run
    assert run(each_time_ready(crash_when_live, stop_when_live)) == 0
    assert len(set(pids)) == 2
    assert front.pids() == []
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
