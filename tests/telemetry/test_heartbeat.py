"""A process says that it lives, what hangs in it, and ends with its server."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from tritandem.telemetry import heartbeat
from tritandem.telemetry.heartbeat import Busy, HangWatch, Heartbeat, read_heartbeat


class Machine:
    """A clock, and the seconds that this process has waited for a core."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waited_s = 50.0
        self.watch = HangWatch(lambda: self.waited_s)

    def look(self, passed_s: float = 0.5, waited_s: float = 0.0) -> str:
        self.now_s += passed_s
        self.waited_s += waited_s
        return self.watch.look(self.now_s)


def looks_until_it_hangs(machine: Machine, most: int = 100, **look: float) -> int:
    """How many looks it took; `most` when it never did."""
    return next((number for number in range(1, most) if machine.look(**look)), most)


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_work_that_outlasts_its_limit_hangs_and_is_named(machine: Machine) -> None:
    step = Busy("a step", 5.0)
    machine.watch.add(step)
    with step:
        # Two looks to see that it is the same work, then half a second each.
        assert looks_until_it_hangs(machine) == 13
        assert machine.look() == "a step has taken more than 5 s"
    assert machine.look() == ""


def test_one_short_work_after_the_other_never_hangs(machine: Machine) -> None:
    step = Busy("a step", 1.0)
    machine.watch.add(step)
    for _ in range(20):
        with step:
            assert machine.look() == ""


def test_the_oldest_of_several_threads_counts(machine: Machine) -> None:
    send = Busy("a send", 5.0)
    machine.watch.add(send)
    inside, leave = threading.Event(), threading.Event()

    def hang() -> None:
        with send:
            inside.set()
            leave.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    inside.wait()
    for _ in range(12):
        with send:
            assert machine.look() == ""
    assert machine.look() != ""
    leave.set()
    thread.join()
    assert machine.look() == ""


def test_time_without_a_core_does_not_count(machine: Machine) -> None:
    step = Busy("a step", 5.0)
    machine.watch.add(step)
    with step:
        # Eight threads that share what is left of a core wait longer than the clock runs.
        assert looks_until_it_hangs(machine, waited_s=3.0) == 100
        # A tenth of a core each: a tenth of the time.
        assert looks_until_it_hangs(machine, waited_s=0.45) == 100
        assert looks_until_it_hangs(machine) < 15


def test_a_look_that_comes_late_says_nothing_about_the_others(machine: Machine) -> None:
    step = Busy("a step", 5.0)
    machine.watch.add(step)
    with step:
        machine.look()
        machine.look()
        assert machine.look(passed_s=3600.0) == ""


def test_the_kernel_is_asked_about_waiting_only_while_something_goes_on() -> None:
    asked: list[int] = []
    watch = HangWatch(lambda: asked.append(1) or 0.0)
    watch.add(Busy("a step", 5.0))
    for now_s in range(10):
        watch.look(float(now_s))
    assert asked == []


def test_a_heartbeat_goes_on_and_names_what_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "PERIOD_S", 0.01)
    path = tmp_path / "beat"
    assert read_heartbeat(path) is None
    beating = Heartbeat(path)
    with beating.busy("a step", 0.02):
        deadline = time.monotonic() + 60
        while not (beat := read_heartbeat(path)) or not beat[1]:
            assert time.monotonic() < deadline, beat
    assert beat[0] > 1
    assert beat[1] == "a step has taken more than 0.02 s"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_heartbeat_that_cannot_be_written_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Event()

    def full(*_: object) -> int:
        written.set()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    path = tmp_path / "beat"
    Heartbeat(path)
    assert written.wait(60)
    deadline = time.monotonic() + 60
    while path.exists():
        assert time.monotonic() < deadline
    assert read_heartbeat(path) is None


SERVER = """
    import subprocess, sys
    stub = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE, text=True)
    print(stub.stdout.readline(), flush=True)
    sys.stdin.read()
"""
STUB = """
    import os, signal, threading
    from tritandem.telemetry.heartbeat import Heartbeat
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Heartbeat(None)
    print(os.getpid(), flush=True)
    threading.Event().wait()
"""


def test_a_process_whose_server_was_killed_ends_itself() -> None:
    words = [sys.executable, "-c", textwrap.dedent(SERVER), textwrap.dedent(STUB)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        stub = int(server.stdout.readline())
        ended = os.pidfd_open(stub)
        server.send_signal(signal.SIGKILL)
        server.wait()
    try:
        assert select.select([ended], [], [], 60)[0]
    finally:
        os.close(ended)
