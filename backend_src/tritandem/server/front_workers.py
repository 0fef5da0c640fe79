"""The processes of the OpenAI API beside one running server: started when it is ready, drained and ended with it.

Owns the processes and the memory that they count in. Runs in the supervisor's thread; knows nothing about HTTP.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..config import load_config, with_replaced
from ..host import Refusal
from . import guardian
from .logfile import open_log
from .options import ServeOptions
from .preflight import refuse_port

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 3.0
RESTART_S = 1.0  # between two starts of one worker
CORES_A_WORKER, MAX_WORKERS = 4, 8


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """`models`: names under which the model is served. `workers`: 0 is by cores. `tls`: certificate and key, as PEM."""

    models: tuple[str, ...]
    keys: Path | None = None
    origins: tuple[str, ...] = ()
    workers: int = 0
    tls: tuple[Path, Path] | None = None
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"

    def base_url(self, serve: ServeOptions) -> str:
        """What clients of OpenAI's are given."""
        return f"{'https' if self.tls else 'http'}://{serve.url(serve.openai_port)}/v1"


@dataclass(slots=True)
class FrontWorkers:
    """`start` raises Refusal; all else never fails. A worker that dies is replaced, with a word to `say`."""

    options: FrontOptions
    say: Callable[[str], None]
    _words: list[str] = field(default_factory=list)
    _log_path: Path = Path(os.devnull)
    _cpus: frozenset[int] = frozenset()
    _running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    _shared: tuple[int, ...] = ()  # memory that all workers count in, and that of their keys' limits
    _started_s: dict[int, float] = field(default_factory=dict)
    _draining: bool = False

    def start(self, serve: ServeOptions, log_path: Path, cpus: frozenset[int]) -> None:
        """Returns when all listen. `cpus`: those that the server's own threads may use."""
        refuse_port("--openai-port", serve.host, serve.openai_port)  # workers share it, with another server's too
        counters, limits = self._shared = tuple(os.memfd_create(f"tritandem-{what}") for what in ("front", "limits"))
        self._words = [sys.executable, "-m", "tritandem.front", "--grpc-url", serve.url(serve.grpc_port)]
        self._words += ["--host", serve.host, "--port", str(serve.openai_port)]
        self._words += ["--counters-fd", str(counters), "--limits-fd", str(limits)]
        self._words += [word for name in self.options.models for word in ("--model", name)]
        self._words += [word for origin in self.options.origins for word in ("--cors", origin)]
        if self.options.keys:
            self._words += ["--keys", str(self.options.keys)]
        if self.options.tls:
            self._words += ["--tls-cert", str(self.options.tls[0]), "--tls-key", str(self.options.tls[1])]
        self._words += ["--tool-parser", self.options.tool_parser]
        self._words += ["--reasoning-parser", self.options.reasoning_parser]
        config = with_replaced(load_config(serve.engine_config), serve.replaced())
        self._words += ["--generation-config", config.scheduler.generation_config]
        if serve.model:
            self._words += ["--model-path", str(serve.model)]
        self._log_path, self._cpus, self._draining = log_path, cpus, False
        pipes = {worker: self._spawn(worker) for worker in range(self.options.workers or workers_for(len(cpus)))}
        end_s = time.monotonic() + START_TIMEOUT_S
        for worker, pipe in pipes.items():
            if not _heard(pipe, end_s):
                self.kill()
                said = f"worker {worker} of the OpenAI API did not start; its words are in {log_path}"
                raise Refusal(said, "serve without it by --openai-port 0")

    def pids(self) -> list[int]:
        """Of the workers that were started and not yet ended by us."""
        return [process.pid for process in self._running.values()]

    def look_after(self) -> None:
        """Replace the workers that have died. Returns at once."""
        for worker, process in list(self._running.items()):
            if self._draining or time.monotonic() - self._started_s[worker] < RESTART_S:
                continue
            if process.poll() is not None:
                self.say(f"worker {worker} of the OpenAI API has ended ({process.returncode}); starting another")
                os.close(self._spawn(worker))

    def drain(self) -> None:
        """New requests are refused, running ones finish; returns at once."""
        self._draining = True
        for process in self._running.values():
            process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """After a drain, and when the server has ended: what still runs has nobody to ask any more."""
        end_s = time.monotonic() + STOP_TIMEOUT_S
        for process in self._running.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end_s - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Idempotent."""
        self._draining = True
        for process in self._running.values():
            process.kill()
            process.wait()
        self._running.clear()
        for descriptor in self._shared:
            os.close(descriptor)
        self._shared = ()

    def _spawn(self, worker: int) -> int:
        """The end of a pipe that gets a line when the worker listens."""
        read, write = os.pipe()
        with open_log(self._log_path) as log:
            process = subprocess.Popen(
                [*self._words, "--worker", str(worker), "--ready-fd", str(write), "--parent", str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[write, *self._shared],
                start_new_session=True,  # Ctrl-C in a terminal reaches the launcher alone, and that one drains
            )
        os.close(write)
        limit = guardian.descriptor_limit()  # every client takes one
        with suppress(OSError, ValueError):
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (limit, limit))
        with suppress(OSError):
            os.sched_setaffinity(process.pid, self._cpus)
        self._running[worker], self._started_s[worker] = process, time.monotonic()
        return read


def workers_for(cores: int) -> int:
    return max(1, min(MAX_WORKERS, cores // CORES_A_WORKER))


def _heard(pipe: int, end_s: float) -> bool:
    """Whether a line comes in time; closes the pipe."""
    ready, _, _ = select.select([pipe], [], [], max(0.0, end_s - time.monotonic()))
    heard = bool(ready and os.read(pipe, 1))
    os.close(pipe)
    return heard
