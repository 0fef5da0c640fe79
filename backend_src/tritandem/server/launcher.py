"""One run of the Triton binary, as a context manager: start, wait until ready, drain, kill.

Owns the guardian process and the folder of this run. Knows nothing about restarts or the terminal. Not thread-safe:
one thread starts and stops; URLs and `pid` may be read from any.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from ..config import DRAIN_KEY_ENV, HEARTBEAT_ENV, INNER_KEY_ENV, PLACEMENT_ENV, load_config
from ..host import Refusal, cache_root
from ..machine.connections import ConnectionWatch
from ..machine.processes import ProcessWatch
from ..telemetry.heartbeat import read_heartbeat
from . import command, guardian
from .health import is_stopped, ready, stub_models
from .hung import HungWatch, Sign
from .layout import backend_folder
from .logfile import STOPPED, LogReader, describe_end, new_log_path, open_log, start_afresh
from .options import ServeOptions, flag_names
from .placing import place_server
from .preflight import check_all, connections_left
from .repository import default_repository, repository_of_run
from .runs import Run, claim, remove_dead_runs

KILL_WAIT_S = 10.0
# For unloading, once the last request has ended. A client that keeps an idle gRPC stream open would hold up
# Triton's exit for ever after that, one that keeps HTTP connections until the exit timeout.
UNLOAD_S = 8.0
POLL_S = 0.05
LOOK_S = 0.25
HEARTBEAT = "beat_"  # and a process id: files in the run's folder, into which nobody else may write


class ServerDied(RuntimeError):
    """The server ended, or did not become ready in time; the message says why as far as the log does."""


class TritonServer:
    """`with TritonServer(model=folder) as server: Client(server.grpc_url) ...`

    Keyword arguments are the fields of ServeOptions; `repository` defaults to the project's. `environment` replaces
    this process's for the server; `say` hears of processes that hung. Entering starts the server and waits until every
    model is ready; leaving drains and stops it. Raises Refusal when it cannot be started, ServerDied when it does not
    come up.
    """

    def __init__(
        self,
        model: Path | None = None,
        *,
        repository: Path | None = None,
        environment: Mapping[str, str] | None = None,
        ready_timeout_s: float = 300.0,
        say: Callable[[str], None] = lambda line: None,
        **options: Any,
    ) -> None:
        self.options = ServeOptions(model, repository or default_repository(), **options)
        self.log_path = self.options.log_path or new_log_path()
        self.ready_timeout_s = ready_timeout_s
        self.pid = 0  # of tritonserver; 0 before it was started
        self.had_hung = False  # whether a process of it was killed for that
        self.cpus: frozenset[int] = frozenset()  # of its own threads, once it was started
        self.shm_prefix = ""  # of this run's files in /dev/shm, once it was started
        self._environment, self._say = environment, say
        self._guardian: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._run: Run | None = None
        self._hung: HungWatch | None = None
        self._looked_s = 0.0
        self._log_start = 0

    @property
    def http_url(self) -> str:
        """host:port"""
        return self.options.url(self.options.http_port)

    @property
    def grpc_url(self) -> str:
        """host:port"""
        return self.options.url(self.options.grpc_port)

    @property
    def metrics_url(self) -> str:
        return f"http://{self.options.url(self.options.metrics_port)}/metrics"

    def start(self) -> None:
        """Check, lay out and start; returns as soon as the process exists. Raises Refusal."""
        remove_dead_runs()
        install = check_all(self.options)
        backends = backend_folder(install, cache_root())
        config = load_config(self.options.engine_config)
        if short := connections_left(guardian.descriptor_limit(), config):
            self._say(short)
        self._hung = HungWatch(config.watch, lambda pid: ProcessWatch(pid).waited_s() or 0.0)
        try:
            self._run = claim()
        except OSError as error:
            raise Refusal(f"nothing can be written: {error}", "free some space there") from error
        self.shm_prefix = self._run.mark
        try:
            devices = [str(device) for device in self.options.devices]
            repository = repository_of_run(
                self.options.repository, self._run.folder, self.options.tokenizer_instances, devices
            )
            admin_key = secrets.token_urlsafe(24)
            words = command.arguments(self.options, install, backends, repository, self.shm_prefix, admin_key)
            inherited = os.environ if self._environment is None else self._environment
            environment = command.environment(self.options, install, inherited)
            environment[HEARTBEAT_ENV] = str(self._run.folder / HEARTBEAT)
            environment[DRAIN_KEY_ENV] = secrets.token_urlsafe(24)
            environment[INNER_KEY_ENV] = secrets.token_urlsafe(24)
            self.cpus, placement = place_server(self.options)
            if placement:
                environment[PLACEMENT_ENV] = placement
            self._spawn([str(install.binary), *words], environment, self.cpus)
        except BaseException:
            self.kill()
            raise

    def wait_ready(
        self,
        timeout_s: float | None = None,
        on_line: Callable[[str], None] = lambda line: None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Wait until every model is ready, handing new log lines to `on_line`; False when `interrupted()` first.

        Raises ServerDied.
        """
        deadline = time.monotonic() + (self.ready_timeout_s if timeout_s is None else timeout_s)
        log = LogReader(self.log_path, self._log_start)
        while not interrupted():
            is_ready = self.is_ready()
            for line in log.new_lines():
                on_line(line)
            if self._run:
                self._run.keep_private()
            self._end_hung(loading=True)
            if is_ready:
                return True
            if (code := self.poll()) is not None:
                raise ServerDied(describe_end(code, self.log()))
            if time.monotonic() > deadline:
                raise ServerDied(f"tritonserver was not ready in time; see {self.log_path}")
            time.sleep(POLL_S)
        return False

    def is_ready(self, timeout_s: float = 5.0) -> bool:
        """Whether the server says now that it and all models are ready."""
        return ready(self.options.client_host, self.options.http_port, timeout_s)

    def poll(self) -> int | None:
        """The server's exit code (128 + n after signal n); None while it runs."""
        code = self._guardian.poll() if self._guardian else None
        return None if code is None else _exit_code(code)

    def look_after(self) -> None:
        """Kill processes that hang, each with a word to `say`; keep the log within its bound; tell the guardian that
        its launcher lives. Returns at once. Whoever has called it once goes on to do so, several times a second: a
        launcher that falls silent counts as hung itself."""
        if self._control is not None:
            with suppress(OSError):  # a guardian that is stopped does not read; it is found below
                self._control.send(b".", socket.MSG_DONTWAIT)
        self._end_hung()
        if start_afresh(self.log_path, self.options.max_log_bytes):
            self._log_start = 0

    def any_stopped(self) -> bool:
        """Whether a signal has stopped a process of this server: it would be waited for in vain."""
        pids = [self.pid, *stub_models(self.pid)] + ([self._guardian.pid] if self._guardian else [])
        return any(is_stopped(pid) for pid in pids)

    def _end_hung(self, loading: bool = False) -> None:
        """While models load, interpreters may be held for long: silence says nothing then, but words do."""
        now_s = time.monotonic()
        if self._hung is None or self._guardian is None or self._run is None or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        signs = {self._guardian.pid: Sign("the guardian", is_stopped(self._guardian.pid))}
        signs[self.pid] = Sign("tritonserver", is_stopped(self.pid))
        for pid, model in stub_models(self.pid).items():
            beat = read_heartbeat(self._run.folder / f"{HEARTBEAT}{pid}")
            if loading and beat is not None and not beat[1]:
                beat = None
            signs[pid] = Sign(f"the process of {model}", is_stopped(pid), beat)
        for pid, what in self._hung.look(signs, now_s).items():
            self.had_hung = True
            self._say(f"{what}: killed")
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def drain(self) -> None:
        """Ask for a clean end and return at once: running requests finish, new ones are refused."""
        if self._guardian and self._guardian.poll() is None:
            self._guardian.send_signal(signal.SIGTERM)

    def stop(
        self,
        timeout_s: float | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        unload_s: float = UNLOAD_S,
    ) -> int:
        """Drain, wait, and kill what is left after the drain timeout, `unload_s` after the last request has ended, or
        when `interrupted()`. Idempotent.

        The last request has ended, every model's process too and no client is connected: what is left of Triton by then
        are waits of a second or two, which are cut short unless it has traces of its own to write. Returns the exit
        code: 0 also when every request had ended.
        """
        # A Prometheus that keeps its connection is no client.
        clients = ConnectionWatch(self.pid, (self.options.http_port, self.options.grpc_port))
        traced = any(name.startswith("trace-") for name in flag_names(self.options.extra_flags))
        may_cut = bool(stub_models(self.pid)) and not traced
        self.drain()
        patience_s = self.options.drain_timeout_s + UNLOAD_S if timeout_s is None else timeout_s
        deadline = last = time.monotonic() + patience_s
        log, idle = LogReader(self.log_path, self._log_start), False
        while self.poll() is None and self._guardian and time.monotonic() < deadline and not interrupted():
            self.look_after()
            if self._told_drained() or any(STOPPED in line for line in log.new_lines()):
                idle, deadline = True, min(last, time.monotonic() + unload_s)
            if idle and may_cut and not stub_models(self.pid) and not _connected(clients):
                break
            time.sleep(POLL_S)
        held_up = self._guardian is not None and self.poll() is None
        code = self.kill()
        return 0 if idle and held_up else code

    def kill(self) -> int:
        """End the server and its stubs now. Returns the exit code; idempotent."""
        if self._control:
            self._control.close()
            self._control = None
        code = self._end_guardian() if self._guardian else 0
        if self._run:
            self._run.end()
            self._run = None
        return _exit_code(code)

    def _end_guardian(self) -> int:
        """It ends by itself, with all that it guards, once it was told to; the server does not outlive it."""
        assert self._guardian is not None
        if is_stopped(self._guardian.pid):
            self._guardian.kill()
        try:
            return self._guardian.wait(KILL_WAIT_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            return self._guardian.wait()

    def _told_drained(self) -> bool:
        """Whether the guardian has said since the last call that the last request has ended."""
        try:
            return self._control is not None and bool(self._control.recv(4096, socket.MSG_DONTWAIT))
        except OSError:
            return False

    def log(self) -> str:
        """What this run has logged so far (the file may hold earlier runs)."""
        with self.log_path.open("rb") as file:
            file.seek(self._log_start)
            return file.read().decode(errors="replace")

    def __enter__(self) -> TritonServer:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _spawn(self, words: list[str], environment: dict[str, str], cpus: frozenset[int]) -> None:
        try:
            log = open_log(self.log_path)
        except OSError as error:
            raise Refusal(
                f"the log {self.log_path} cannot be written: {error.strerror}", "name a file with --log-file"
            ) from error
        self._control, theirs = socket.socketpair()
        options = self.options
        assert self._run is not None
        guarded = [str(self._run.lock), self.shm_prefix, options.client_host, str(options.http_port)]
        guarded.append(str(drain_ms(options.drain_timeout_s)))
        guarded.append(",".join(str(cpu) for cpu in sorted(cpus)))
        with theirs, log:
            self._log_start = log.tell()
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, str(theirs.fileno()), *guarded, *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno(), self._run.lock],
                start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone, and that one drains
            )
        with self._control.makefile("rb") as messages:
            self.pid = int(messages.readline() or b"0")


def _connected(clients: ConnectionWatch) -> bool:
    """Whether some client may still have something to read; also where the kernel does not tell."""
    seen = clients.read()
    return seen is None or seen.open > 0


def drain_ms(drain_timeout_s: float) -> int:
    """For requests to end by themselves; the rest of Triton's exit timeout is for ending the others and unloading."""
    return int(max(0.5 * drain_timeout_s, drain_timeout_s - UNLOAD_S) * 1000)


def _exit_code(code: int) -> int:
    """Of the server: 128 + n after signal n, also when it was its guardian that the signal killed."""
    return code if code >= 0 else 128 - code
