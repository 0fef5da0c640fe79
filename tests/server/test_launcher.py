"""Starting, draining and killing one server; nothing of it may outlive its owner."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritandem.host import Refusal, cache_root
from tritandem.machine.cpu_list import parse_cpus
from tritandem.server import command, guardian, logfile, runs
from tritandem.server.health import stub_models
from tritandem.server.launcher import ServerDied, TritonServer
from tritandem.server.locate import TritonInstall
from tritandem.server.options import ServeOptions

from tests.fakes.ports import free_ports

SHM = Path("/dev/shm")


def state(pid: int) -> str:
    """The kernel's letter; X: there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def session_of(leader: int) -> list[int]:
    """Live processes in the session that `leader` began: the guardian, the server, its stubs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == leader and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def wait_until_gone(leader: int, timeout_s: float = 10.0) -> list[int]:
    deadline = time.monotonic() + timeout_s
    while (left := session_of(leader)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def test_a_started_server_becomes_ready_and_stops_cleanly(make_server) -> None:
    with make_server({"ready_after_s": 0.2}) as server:
        assert server.is_ready()
        assert server.poll() is None
        leader = os.getsid(server.pid)
        assert len(session_of(leader)) == 4
    assert server.poll() == 0
    assert session_of(leader) == []


def test_the_server_runs_where_it_was_told_to_and_its_children_know_what_else_there_is(make_server) -> None:
    allowed = os.sched_getaffinity(0)
    first = min(allowed)
    with make_server({}, placement=f"server={first}") as server:
        # The fake binary is a child of the shell that stands for it: both have inherited the mask.
        assert os.sched_getaffinity(server.pid) == {first}
        words = Path(f"/proc/{server.pid}/environ").read_bytes().decode().split("\0")
    environment = dict(word.split("=", 1) for word in words if "=" in word)
    assert environment["TRITANDEM_PLACEMENT"] == f"server={first}"
    assert parse_cpus(environment["TRITANDEM_ALLOWED_CPUS"]) == allowed
    assert os.sched_getaffinity(0) == allowed


def test_the_server_may_open_as_many_files_as_the_machine_lets_it(make_server) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    try:
        with make_server() as server:
            assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE)[0] == min(hard, guardian.MOST_DESCRIPTORS)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_operators_own_thread_counts_and_device_order_stay() -> None:
    chosen = {"OPENBLAS_NUM_THREADS": "3", "CUDA_DEVICE_ORDER": "FASTEST_FIRST", "TRITON_CACHE_DIR": "/kernels"}
    environment = {**os.environ, **chosen}
    options = ServeOptions(None, Path("/repository"))
    install = TritonInstall(*[Path("/x")] * 4, (), False, False)
    made = command.environment(options, install, environment)
    assert {name: made[name] for name in chosen} == chosen
    made = command.environment(options, install, {})
    assert (made["OPENBLAS_NUM_THREADS"], made["CUDA_DEVICE_ORDER"]) == ("1", "PCI_BUS_ID")
    assert made["TRITON_CACHE_DIR"] == str(cache_root() / "kernels")


def test_progress_lines_reach_the_caller_while_waiting(make_server) -> None:
    server, lines = make_server({"ready_after_s": 0.3}), []
    server.start()
    assert server.wait_ready(10.0, on_line=lines.append)
    assert any("successfully loaded 'echo'" in line for line in lines)


def test_waiting_can_be_interrupted(make_server) -> None:
    server = make_server({"ready_after_s": 100})
    server.start()
    assert server.wait_ready(10.0, interrupted=lambda: True) is False


def test_a_failed_start_says_why(make_server) -> None:
    server = make_server({"fail": "failed to load 'engine' version 1: Internal: no weights"})
    server.start()
    with pytest.raises(ServerDied, match="exit code 1: model engine: Internal: no weights"):
        server.wait_ready(10.0)


def test_a_server_that_is_not_ready_in_time_is_reported(make_server) -> None:
    server = make_server({"ready_after_s": 100})
    server.start()
    with pytest.raises(ServerDied, match="not ready in time"):
        server.wait_ready(0.3)


def test_unknown_flags_reach_the_binary_which_refuses_them(make_server) -> None:
    server = make_server(extra_flags=("--no-such-flag",))
    server.start()
    with pytest.raises(ServerDied, match="unrecognized option '--no-such-flag'"):
        server.wait_ready(10.0)


def test_a_flag_of_the_users_replaces_ours(make_server) -> None:
    with make_server(extra_flags=("--exit-timeout-secs=7", "--http-thread-count=3")) as server:
        flags = json.loads(server.log().splitlines()[0])["flags"]
    assert flags["exit-timeout-secs"] == ["7"]
    assert flags["http-thread-count"] == ["3"]
    assert len(flags["backend-config"]) == 2


def test_connections_held_open_after_a_drain_do_not_make_the_stop_unclean(make_server) -> None:
    server = make_server({"held_open": True})
    server.start()
    server.wait_ready(10.0)
    with socket.create_connection((server.options.client_host, server.options.http_port)):
        begun = time.monotonic()
        assert server.stop(unload_s=1.5) == 0
        assert time.monotonic() - begun >= 1.5  # a client may have something to read


def test_a_server_that_traces_may_write_what_it_has(make_server) -> None:
    server = make_server({"held_open": True}, extra_flags=("--trace-config=level=TIMESTAMPS",))
    server.start()
    server.wait_ready(10.0)
    begun = time.monotonic()
    assert server.stop(unload_s=1.5) == 0
    assert time.monotonic() - begun >= 1.5


def test_a_server_that_nobody_is_connected_to_ends_with_its_stubs(make_server) -> None:
    server = make_server({"held_open": True})
    server.start()
    server.wait_ready(10.0)
    begun = time.monotonic()
    assert server.stop(timeout_s=60.0, unload_s=60.0) == 0
    assert time.monotonic() - begun < 20.0


def test_connections_that_outlast_the_last_request_do_not_hold_the_stop_up(make_server) -> None:
    """Triton waits for HTTP connections before it says anything; the scheduler has said that it is done."""
    with make_server({"drain_s": 60.0}, drain_timeout_s=60.0) as server:
        begun = time.monotonic()
        assert server.stop(unload_s=0.2) == 0
        assert time.monotonic() - begun < 20.0


def test_a_server_that_ignores_the_drain_is_killed_with_its_stubs(make_server) -> None:
    with make_server({"ignore_sigterm": True}) as server:
        leader = os.getsid(server.pid)
        assert server.stop(timeout_s=0.3) == 128 + signal.SIGKILL
        assert session_of(leader) == []


def test_stubs_and_shared_memory_do_not_outlive_a_server_that_was_killed(make_server) -> None:
    with make_server({"shm": True}) as server:
        leader = os.getsid(server.pid)
        region = SHM / f"{server.shm_prefix}region"
        assert region.exists()
        os.kill(server.pid, signal.SIGKILL)
        assert wait_until_gone(leader) == []
        assert server.stop() == 128 + signal.SIGKILL
        assert not region.exists()


def test_nothing_outlives_a_guardian_that_was_killed(make_server) -> None:
    with make_server({"shm": True}) as server:
        leader, mark = os.getsid(server.pid), server.shm_prefix
        folder = Path((SHM / f"{mark}lock").read_text())
        assert folder.is_dir()
        assert (SHM / f"{mark}region").exists()
        os.kill(leader, signal.SIGKILL)
        assert server.stop() == 128 + signal.SIGKILL
        assert wait_until_gone(leader) == []
        assert not folder.exists()
        assert list(SHM.glob(f"{mark}*")) == []


def killed_when_stopped(server: TritonServer, pid: int) -> None:
    """Look after the server until a process of it that a signal has stopped is gone."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while state(pid) not in "ZX":
        assert time.monotonic() < deadline
        server.look_after()
        time.sleep(0.02)


@pytest.mark.parametrize("which", ["guardian", "server", "stub"])
def test_a_process_that_was_stopped_is_killed_and_said(make_server, which: str) -> None:
    said: list[str] = []
    with make_server(say=said.append) as server:
        leader = os.getsid(server.pid)
        victim = {"guardian": leader, "server": server.pid, "stub": next(iter(stub_models(server.pid)))}[which]
        killed_when_stopped(server, victim)
        deadline = time.monotonic() + 60
        while which != "stub" and server.poll() is None:  # the guardian has yet to see it
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert server.stop(timeout_s=5.0) == (0 if which == "stub" else 128 + signal.SIGKILL)
        assert wait_until_gone(leader) == []
    name = {"guardian": "the guardian", "server": "tritonserver", "stub": "the process of "}[which]
    assert said == [f"{name} has been stopped by a signal: killed"]


def test_a_stop_does_not_wait_for_a_process_that_was_stopped(make_server) -> None:
    with make_server() as server:
        os.kill(os.getsid(server.pid), signal.SIGSTOP)
        begun = time.monotonic()
        assert server.stop(timeout_s=600.0) == 128 + signal.SIGKILL
        assert time.monotonic() - begun < 60.0


def test_regions_and_logs_are_for_nobody_else(make_server, tmp_path: Path) -> None:
    with make_server({"shm": True}, log_path=tmp_path / "log") as server:
        files = [tmp_path / "log", *SHM.glob(f"{server.shm_prefix}*")]
        assert len(files) == 3
        assert {path.stat().st_mode & 0o077 for path in files} == {0}


def test_a_link_among_the_regions_protects_nothing_else(tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.touch(0o644)
    run = runs.claim()
    try:
        (SHM / f"{run.mark}link").symlink_to(public)
        run.keep_private()
    finally:
        run.end()
    assert public.stat().st_mode & 0o777 == 0o644
    assert list(SHM.glob(f"{run.mark}*")) == []


def test_the_log_begins_anew_when_it_is_too_long(make_server, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with make_server(log_path=log, max_log_bytes=800) as server:
        before = log.read_text()
        assert len(before) > 800
        server.look_after()
        assert (tmp_path / "log.1").read_text() == before
        assert server.log() == ""
        assert server.stop() == 0
        assert "All models are stopped" in server.log()


OWNER = """
    import json, os, sys
    from pathlib import Path
    from tritandem.server import TritonServer, preflight
    from tritandem.server.locate import TritonInstall
    binary, repository, ports = Path(sys.argv[1]), Path(sys.argv[2]), [int(p) for p in sys.argv[3:6]]
    install = TritonInstall(binary, binary, binary, binary, (), False, False)
    preflight.find_install = lambda: install
    server = TritonServer(repository=repository, http_port=ports[0], grpc_port=ports[1], metrics_port=ports[2])
    server.start()
    server.wait_ready(20)
    print(os.getsid(server.pid), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def owner(fake_install, repository) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that has started a server, and the server's guardian."""
    words = [sys.executable, "-c", textwrap.dedent(OWNER), str(fake_install.binary), str(repository)]
    words += [str(port) for port in free_ports(3)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        leader = int(process.stdout.readline())
        assert len(session_of(leader)) == 4
        yield process, leader
        process.kill()
    wait_until_gone(leader)


def traces_of(leader: int) -> tuple[str, list[Path]]:
    """The mark of a guardian's run, and its files and folder."""
    mark = Path(f"/proc/{leader}/cmdline").read_text().split("\0")[6]
    return mark, [Path((SHM / f"{mark}lock").read_text()), *SHM.glob(f"{mark}*")]


def test_nothing_outlives_an_owner_that_was_killed(owner) -> None:
    process, leader = owner
    _, traces = traces_of(leader)
    process.kill()
    assert wait_until_gone(leader) == []
    assert [path for path in traces if path.exists()] == []


def test_what_a_killed_owner_and_guardian_leave_is_removed_by_the_next_start_and_a_live_servers_is_not(
    owner, make_server
) -> None:
    process, leader = owner
    mark, traces = traces_of(leader)
    stubs = [pid for pid in session_of(leader) if guardian.is_stub_of(mark, str(pid))]
    assert len(stubs) == 2
    with make_server() as other:
        living = list(SHM.glob(f"{other.shm_prefix}*"))
        os.kill(leader, signal.SIGKILL)
        process.kill()
        process.wait()
        while state(leader) not in "ZX":
            time.sleep(0.01)
        assert all(path.exists() for path in traces)
        with make_server():
            assert [path for path in traces if path.exists()] == []
            assert wait_until_gone(leader) == []
            assert all(path.exists() for path in living)
            assert other.is_ready()


def test_a_drain_that_cannot_be_logged_is_told_to_the_launcher_all_the_same() -> None:
    launcher, control = socket.socketpair()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK)
    stderr = os.dup(2)
    with launcher, control, open("/dev/full", "wb") as full, subprocess.Popen(["/bin/sleep", "600"]) as server:
        os.write(wake_write, bytes([signal.SIGTERM]))
        watch = guardian.Watch(server.pid, control, wake_read, lambda tell_drained: tell_drained(), 30.0)
        os.dup2(full.fileno(), 2)
        try:
            launcher.send(b".")  # from here on it looks by itself, without a SIGCHLD
            server.returncode = os.waitstatus_to_exitcode(watch.run())
        finally:
            os.dup2(stderr, 2)
        assert server.returncode == -signal.SIGTERM
        assert launcher.recv(100).decode().strip() == guardian.DRAINED
    for descriptor in (stderr, wake_read, wake_write):
        os.close(descriptor)


def test_a_guardian_whose_launcher_falls_silent_ends_the_server_and_the_launcher(monkeypatch) -> None:
    monkeypatch.setattr(guardian, "LAUNCHER_SILENCE_S", 0.2)
    monkeypatch.setattr(guardian, "LOOK_S", 0.05)
    launcher, control = socket.socketpair()
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK)
    with launcher, control, subprocess.Popen(["/bin/sleep", "600"]) as server:
        launcher.send(b".")
        watch = guardian.Watch(server.pid, control, wake_read, lambda tell_drained: tell_drained(), 30.0)
        status = watch.run()
        server.returncode = status
        assert os.WTERMSIG(status) == signal.SIGTERM
        assert watch.launcher_hangs
        assert launcher.recv(100).decode().strip() == guardian.DRAINED
    os.close(wake_read)
    os.close(wake_write)


def test_the_server_does_not_feel_the_owners_ctrl_c(make_server) -> None:
    with make_server() as server:
        assert os.getsid(server.pid) != os.getsid(0)


def test_a_busy_port_is_refused_before_anything_starts(make_server) -> None:
    with make_server() as first:
        second = make_server()
        second.options = first.options
        with pytest.raises(Refusal, match=f"port {first.options.http_port} on 127.0.0.1 cannot be used"):
            second.start()


def test_a_log_that_cannot_be_written_is_refused(make_server, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path, tmp_path / "file" / "log"):
        with pytest.raises(Refusal, match="cannot be written"):
            make_server(log_path=path).start()


def test_unknown_options_are_refused() -> None:
    with pytest.raises(TypeError, match="http_prt"):
        TritonServer(repository=Path("/"), http_prt=8000)


def test_the_scheduler_drains_first_and_its_answer_is_awaited_through_the_stop(make_server) -> None:
    server = make_server({"drain_s": 0.3}, drain_timeout_s=20.0)
    with server:
        pass
    said = [line for line in server.log().splitlines() if "drain" in line and "server.cc" in line]
    assert "asked to drain within 12000 ms, asked_to_stop.is_set()=False" in said[0]
    assert "drained, asked_to_stop.is_set()=True" in said[1]
    assert server.poll() is not None


def test_a_scheduler_that_drains_at_once_is_waited_for_before_triton_is_told(make_server) -> None:
    with make_server({"drained": True}) as server:
        pass
    lines = server.log().splitlines()
    [drained] = [number for number, line in enumerate(lines) if "drained, asked_to_stop.is_set()=False" in line]
    [stopped] = [number for number, line in enumerate(lines) if "All models are stopped" in line]
    [told] = [number for number, line in enumerate(lines) if line == guardian.DRAINED]
    assert drained < told < stopped


def test_a_log_that_another_start_removes_meanwhile_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = logfile.new_log_path().parent
    folder.mkdir(parents=True)
    (folder / "triton-gone.log").symlink_to("nowhere")
    assert logfile.new_log_path().parent == folder
