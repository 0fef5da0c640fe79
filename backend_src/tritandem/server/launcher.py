"""One run of the Triton binary, as a context manager: start, wait until ready, drain, kill.

Owns the guardian process and the folder of this run. Knows nothing about restarts or the terminal. Not thread-safe:
one thread starts and stops; URLs and `pid` may be read from any.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..config import DRAIN_KEY_ENV, PLACEMENT_ENV
from ..host import Refusal, cache_root
from ..telemetry.connections import ConnectionWatch
from . import command, guardian
from .health import live_stubs, ready
from .layout import backend_folder
from .logfile import REQUESTS_ENDED, LogReader, describe_end
from .options import ServeOptions, flag_names
from .placing import place_server
from .preflight import check_all
from .repository import default_repository, repository_of_run

KILL_WAIT_S = 10.0
# For unloading, once the last request has ended. A client that keeps an idle gRPC stream open would hold up
# Triton's exit for ever after that, one that keeps HTTP connections until the exit timeout.
UNLOAD_S = 8.0
POLL_S = 0.05
KEPT_LOGS = 20


class ServerDied(RuntimeError):
    """The server ended, or did not become ready in time; the message says why as far as the log does."""


class TritonServer:
    """`with TritonServer(model=folder) as server: Client(server.grpc_url) ...`

    Keyword arguments are the fields of ServeOptions; `repository` defaults to the project's. `environment` replaces
    this process's for the server. Entering starts the server and waits until every model is ready; leaving drains
    and stops it. Raises Refusal when it cannot be started, ServerDied when it does not come up.
    """

    def __init__(
        self,
        model: Path | None = None,
        *,
        repository: Path | None = None,
        environment: Mapping[str, str] | None = None,
        ready_timeout_s: float = 300.0,
        **options: Any,
    ) -> None:
        self.options = ServeOptions(model, repository or default_repository(), **options)
        self.log_path = self.options.log_path or new_log_path()
        self.ready_timeout_s = ready_timeout_s
        self.pid = 0  # of tritonserver; 0 before it was started
        self.shm_prefix = f"tritandem_{secrets.token_hex(6)}_"  # of this run's regions in /dev/shm
        self._environment = environment
        self._guardian: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._run_folder: Path | None = None
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
        install = check_all(self.options)
        backends = backend_folder(install, cache_root())
        self._run_folder = Path(tempfile.mkdtemp(prefix="tritandem-run-"))
        try:
            repository = repository_of_run(
                self.options.repository, self._run_folder, self.options.tokenizer_instances, self.options.devices
            )
            admin_key = secrets.token_urlsafe(24)
            words = command.arguments(self.options, install, backends, repository, self.shm_prefix, admin_key)
            inherited = os.environ if self._environment is None else self._environment
            environment = command.environment(self.options, install, inherited)
            environment[DRAIN_KEY_ENV] = secrets.token_urlsafe(24)
            cpus, placement = place_server(self.options)
            if placement:
                environment[PLACEMENT_ENV] = placement
            self._spawn([str(install.binary), *words], environment, cpus)
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
        return self._guardian.poll() if self._guardian else None

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
        may_cut = bool(live_stubs(self.pid)) and not traced
        self.drain()
        patience_s = self.options.drain_timeout_s + UNLOAD_S if timeout_s is None else timeout_s
        deadline = last = time.monotonic() + patience_s
        log, idle = LogReader(self.log_path, self._log_start), False
        while self.poll() is None and self._guardian and time.monotonic() < deadline and not interrupted():
            if any(end in line for line in log.new_lines() for end in REQUESTS_ENDED):
                idle, deadline = True, min(last, time.monotonic() + unload_s)
            if idle and may_cut and not live_stubs(self.pid) and not _connected(clients):
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
        code = self._guardian.wait(KILL_WAIT_S) if self._guardian else 0
        if self._run_folder:
            shutil.rmtree(self._run_folder, ignore_errors=True)
            self._run_folder = None
        return code

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
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            log = self.log_path.open("ab")
        except OSError as error:
            raise Refusal(
                f"the log {self.log_path} cannot be written: {error.strerror}", "name a file with --log-file"
            ) from error
        self._control, theirs = socket.socketpair()
        options = self.options
        guarded = [self.shm_prefix, options.client_host, str(options.http_port), str(drain_ms(options.drain_timeout_s))]
        guarded.append(",".join(str(cpu) for cpu in sorted(cpus)))
        with theirs, log:
            self._log_start = log.tell()
            self._guardian = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian.__file__, str(theirs.fileno()), *guarded, *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
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


def new_log_path() -> Path:
    """A file for one more server's log in the cache folder; only the newest few are kept."""
    folder = cache_root() / "logs"
    old = sorted(folder.glob("triton-*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in old[KEPT_LOGS - 1 :]:
        path.unlink(missing_ok=True)
    return folder / f"triton-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(2)}.log"
