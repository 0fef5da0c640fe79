"""The parent process of tritonserver: nothing that the server started outlives it, whoever is killed.

Run by path as a script of its own (`guardian.py CONTROL_FD SHM_PREFIX HTTP_HOST HTTP_PORT DRAIN_MS CPUS COMMAND ...`),
standard library only, one thread. CPUS, numbers with commas between, are where the server runs. The launcher holds the
other end of the control socket; its end of file means that the launcher has died or wants the server dead now. SIGTERM
is passed on, after the scheduler was asked to drain. The exit code is the server's; 128 + n after signal n.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHM_FOLDER = "/dev/shm"
SWEEP_S = 5.0
KEY_ENV = "TRITANDEM_DRAIN_KEY"
DRAIN_PATH = "/v2/models/scheduler/generate_stream"
ANSWER_S = 2.0
# An idle scheduler has drained within that.
IDLE_DRAIN_S = 0.2
# Written to the server's log once the scheduler holds no request any more.
DRAINED = "guardian: the last request has ended"


def main(argv: list[str]) -> int:
    control = socket.socket(fileno=int(argv[1]))
    shm_prefix, drain_address, drain_ms, command = argv[2], (argv[3], int(argv[4])), int(argv[5]), argv[7:]
    cpus = [int(cpu) for cpu in argv[6].split(",")]
    libc = ctypes.CDLL(None, use_errno=True)
    # Stubs whose server died become children of this process, so that they can be found and ended.
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake_write)
    for number in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    server = start(command, libc, cpus)
    control.sendall(f"{server}\n".encode())
    try:
        status = watch(server, control, wake_read, lambda: ask_to_drain(drain_address, drain_ms))
    finally:
        sweep(server)
        remove_shared_memory(shm_prefix)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def start(command: list[str], libc: ctypes.CDLL, cpus: list[int]) -> int:
    """Fork and execute in a process group of its own; should this process be killed, the server is too."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setpgid(0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        keep_to(cpus)
        os.execv(command[0], command)
    except OSError as error:
        os.write(2, f"cannot execute {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def keep_to(cpus: list[int]) -> None:
    """A sandbox that forbids it is no reason not to serve."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        os.write(2, f"the server cannot be pinned to CPUs {cpus}: {error.strerror}\n".encode())


def watch(server: int, control: socket.socket, wake: int, drain: Callable[[], socket.socket | None]) -> int:
    """Returns the server's wait status once it has ended.

    The drain's connection is held until it is over: Triton tears its HTTP side down once no connection is left, and
    crashes when a request that came over HTTP, its client long gone, still answers after that.
    """
    draining: socket.socket | None = None
    while True:
        waited = [control.fileno(), wake] + ([draining.fileno()] if draining else [])
        ready, _, _ = select.select(waited, [], [])
        if draining and draining.fileno() in ready and is_over(draining):
            draining.close()
            draining = None
            os.write(2, f"{DRAINED}\n".encode())
        if control.fileno() in ready and not control.recv(64):
            os.kill(server, signal.SIGKILL)
            return os.waitpid(server, 0)[1]
        if wake in ready and signal.SIGTERM in os.read(wake, 64):
            draining = draining or drain()
            os.kill(server, signal.SIGTERM)
        while True:
            pid, status = reap()
            if pid == server:
                return status
            if pid == 0:
                break


def ask_to_drain(address: tuple[str, int], timeout_ms: int) -> socket.socket | None:
    """Returns when the scheduler refuses new requests; the open connection ends when none is left. None: none was left,
    or there is no scheduler that answers."""
    key = os.environ.get(KEY_ENV, "")
    fields = {"stop": True, "stream": True, "drain_key": key, "drain_timeout_ms": timeout_ms}
    body = json.dumps(fields).encode()
    head = f"POST {DRAIN_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    try:
        connection = socket.create_connection(address, ANSWER_S)
        connection.sendall(head.encode() + body)
        answer = connection.recv(4096)
    except OSError:
        return None
    if b" 200 " in answer.partition(b"\r\n")[0]:
        if b"drained" not in answer and not (
            select.select([connection], [], [], IDLE_DRAIN_S)[0] and is_over(connection)
        ):
            return connection
        close_both_sides(connection)
        os.write(2, f"{DRAINED}\n".encode())
    connection.close()
    return None


def close_both_sides(connection: socket.socket) -> None:
    """Returns when the server has closed its side as well: one that it still counts costs its stop a second."""
    try:
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass
    except OSError:
        pass


def is_over(draining: socket.socket) -> bool:
    """Whether the scheduler has said its last word, or can say nothing any more."""
    try:
        data = draining.recv(4096)
    except OSError:
        return True
    return not data or b"drained" in data


def reap() -> tuple[int, int]:
    """(pid, status) of one ended child, (0, 0) when there is none."""
    try:
        return os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return 0, 0


def sweep(server: int) -> None:
    """Kill and reap what the server left behind: its process group, then whatever was handed to this process."""
    deadline = time.monotonic() + SWEEP_S
    while time.monotonic() < deadline:
        for kill, target in ((os.killpg, server), *((os.kill, pid) for pid in children())):
            try:
                kill(target, signal.SIGKILL)
            except ProcessLookupError:
                continue
        while reap()[0]:
            pass
        if not children():
            return
        time.sleep(0.02)


def children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]


def remove_shared_memory(prefix: str) -> None:
    """A server that was killed leaves its regions in /dev/shm; their names begin with this run's own prefix."""
    for name in os.listdir(SHM_FOLDER):
        if prefix and name.startswith(prefix):
            os.unlink(os.path.join(SHM_FOLDER, name))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
