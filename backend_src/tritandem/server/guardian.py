"""The parent process of tritonserver: nothing that the server started outlives it, whoever is killed.

Run by path as a script of its own (`guardian.py CONTROL_FD LOCK_FD MARK HTTP_HOST HTTP_PORT DRAIN_MS CPUS COMMAND ..`),
standard library only, one thread. CPUS, numbers with commas between, are where the server runs. The launcher holds the
other end of the control socket; its end of file means that the launcher has died or wants the server dead now, and a
launcher that has spoken and then falls silent hangs. SIGTERM is passed on, after the scheduler was asked to drain. The
exit code is the server's; 128 + n after signal n.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
SHM_FOLDER = "/dev/shm"
LOCK = "lock"  # MARK + LOCK in SHM_FOLDER: locked while the run lives, holds the path of its folder
FOLDER_PREFIX = "tritandem-run-"
STUB_NAME = "triton_python_backend_stub"
SWEEP_S = 5.0
KEY_ENV = "TRITANDEM_DRAIN_KEY"
DRAIN_PATH = "/v2/models/scheduler/generate_stream"
ANSWER_S = 2.0
# An idle scheduler has drained within that.
IDLE_DRAIN_S = 0.2
# Written to the server's log, and told to the launcher, once the scheduler holds no request any more.
DRAINED = "guardian: the last request has ended"
# Seconds after which a launcher that has spoken before counts as hung, and between looks at that.
LAUNCHER_SILENCE_S, LOOK_S = 60.0, 2.0
# For unloading, when nobody else is left to end a server that does not.
UNLOAD_S = 10.0
# More open files than any server has use for; beyond it, programs that walk over all of them take their time.
MOST_DESCRIPTORS = 1 << 20


def main(argv: list[str]) -> int:
    control, lock = socket.socket(fileno=int(argv[1])), int(argv[2])
    mark, drain_address, drain_ms, command = argv[3], (argv[4], int(argv[5])), int(argv[6]), argv[8:]
    cpus = [int(cpu) for cpu in argv[7].split(",")]
    launcher = os.getppid()
    for fd in (control.fileno(), lock):  # the server's stubs must not hold them when this process is killed
        os.set_inheritable(fd, False)
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
    watch = Watch(server, control, wake_read, lambda told: ask_to_drain(drain_address, drain_ms, told), drain_ms / 1e3)
    try:
        status = watch.run()
    finally:
        sweep(server)
        remove_traces(mark)
    if watch.launcher_hangs and os.getppid() == launcher:
        os.kill(launcher, signal.SIGKILL)
    return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def say(text: str) -> None:
    """Into the server's log; on a full disk it is not worth an end."""
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


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
        raise_descriptor_limit()
        os.execv(command[0], command)
    except OSError as error:
        say(f"cannot execute {command[0]}: {error.strerror}")
    finally:
        os._exit(127)


def keep_to(cpus: list[int]) -> None:
    """A sandbox that forbids it is no reason not to serve."""
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        say(f"the server cannot be pinned to CPUs {cpus}: {error.strerror}")


def raise_descriptor_limit() -> None:
    """Every connection takes one; the soft limit is a default for programs that use select()."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def descriptor_limit() -> int:
    """How many files and connections a server that is started here may have open."""
    soft, hard = (
        MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    return max(soft, min(hard, MOST_DESCRIPTORS))


class Watch:
    """Waits for the end of the server, for signals and for the launcher, all at once.

    The drain's connection is held until it is over: Triton tears its HTTP side down once no connection is left, and
    crashes when a request that came over HTTP, its client long gone, still answers after that.
    """

    def __init__(
        self,
        server: int,
        control: socket.socket,
        wake: int,
        drain: Callable[[Callable[[], None]], socket.socket | None],
        drain_s: float,
    ) -> None:
        self._server, self._control, self._wake, self._drain, self._drain_s = server, control, wake, drain, drain_s
        self._draining: socket.socket | None = None
        self._silent_s: float | None = None  # None: the launcher has not spoken, and need not
        self._give_up_s: float | None = None
        self.launcher_hangs = False

    def run(self) -> int:
        """Returns the server's wait status once it has ended."""
        while True:
            waited = [self._control.fileno(), self._wake] + ([self._draining.fileno()] if self._draining else [])
            begun_s = time.monotonic()
            ready, _, _ = select.select(waited, [], [], None if self._silent_s is None else LOOK_S)
            if self._draining and self._draining.fileno() in ready and is_over(self._draining):
                self._draining.close()
                self._draining = None
                self._tell_drained()
            if self._control.fileno() in ready:
                if not self._control.recv(4096):
                    return self._kill()
                self._silent_s = 0.0
            elif self._silent_s is not None:
                # A look that comes late says that this process got no core: no more than its own share counts.
                self._silent_s += min(time.monotonic() - begun_s, LOOK_S)
            if self._wake in ready and signal.SIGTERM in os.read(self._wake, 64):
                self._stop()
            if self._silent_s is not None and self._silent_s > LAUNCHER_SILENCE_S and not self.launcher_hangs:
                say(f"guardian: no sign of life from `tritandem serve` for {self._silent_s:.0f} s; stopping the server")
                self.launcher_hangs, self._give_up_s = True, time.monotonic() + self._drain_s + UNLOAD_S
                self._stop()
            if self._give_up_s is not None and time.monotonic() > self._give_up_s:
                return self._kill()
            while True:
                pid, status = reap()
                if pid == self._server:
                    return status
                if pid == 0:
                    break

    def _stop(self) -> None:
        self._draining = self._draining or self._drain(self._tell_drained)
        os.kill(self._server, signal.SIGTERM)

    def _kill(self) -> int:
        os.kill(self._server, signal.SIGKILL)
        return os.waitpid(self._server, 0)[1]

    def _tell_drained(self) -> None:
        say(DRAINED)
        with suppress(OSError):
            self._control.send(f"{DRAINED}\n".encode(), socket.MSG_DONTWAIT)


def ask_to_drain(address: tuple[str, int], timeout_ms: int, tell_drained: Callable[[], None]) -> socket.socket | None:
    """Returns when the scheduler refuses new requests; the open connection ends when none is left. None: none was left,
    and that was told, or there is no scheduler that answers."""
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
        tell_drained()
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


def remove_traces(mark: str) -> None:
    """End a run's stubs, remove its files in /dev/shm and its folder, whoever of its processes was killed."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and is_stub_of(mark, entry):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(int(entry), signal.SIGKILL)
    lock = os.path.join(SHM_FOLDER, mark + LOCK)
    with suppress(OSError), open(lock, "rb") as file:
        folder = os.fsdecode(file.read())
        if os.path.basename(folder).startswith(FOLDER_PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
    names = [name for name in os.listdir(SHM_FOLDER) if name.startswith(mark)]
    # The lock last: until then others can tell whose the rest is.
    for name in sorted(names, key=lambda name: name == mark + LOCK):
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(SHM_FOLDER, name))


def is_stub_of(mark: str, pid: str) -> bool:
    """Triton names a stub's shared memory on its command line, and every region of a run begins with its mark."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            program, *words = file.read().decode(errors="replace").split("\0")
    except OSError:
        return False
    return program.endswith(STUB_NAME) and any(word.startswith(mark) for word in words)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
