"""`tritandem serve` as a child process, seen from outside: its processes, memory, log files and metrics.

Owns the child. Reads /proc and /dev/shm; changes nothing on the server but what `signal_model` and `stop`
do.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tritandem.server.health import stub_models

from .memory import PROC, SHM, Memory, private_mb, shared_mb

READY = "ready: "
WELL = "] try: "  # in a line that only follows `ready`
STARTED = "Started HTTPService"  # in Triton's log, once a run
_SHM_PREFIX = re.compile(r"shm-region-prefix-name=(\w+)")
_REQUEST_LINE = re.compile(r'\] "?(\{.*event.*request.*\})"?$')
_OUTCOME_METRIC = re.compile(r'^tritandem_requests_total\{outcome="(\w+)",.*\} (\d+)')


class Served:
    """Entering waits for the first `ready`. `said` holds (seconds, line) of everything it said; `log` is Triton's, of
    all runs one after the other."""

    def __init__(self, words: Sequence[str], log: Path, http_port: int, grpc_port: int, metrics_port: int) -> None:
        self.log = log
        self.http_url, self.grpc_url = f"127.0.0.1:{http_port}", f"127.0.0.1:{grpc_port}"
        self._metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        ports = ["--http-port", str(http_port), "--grpc-port", str(grpc_port), "--metrics-port", str(metrics_port)]
        self.said: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self.shm_prefixes: set[str] = set()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tritandem.cli", "serve", *ports, "--log-file", str(log), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.said.append((time.monotonic(), line.rstrip()))
                self._changed.notify_all()
        self.process.wait()
        with self._changed:
            self._changed.notify_all()

    def times(self, words: str) -> int:
        """How often it has said this."""
        return sum(words in line for _, line in self.said)

    def trouble(self, times: int) -> tuple[float, str] | None:
        """(seconds, line): the first that it has said since it was ready for this time; None: all is well."""
        with self._changed:
            [*_, since] = itertools.islice((at for at, (_, line) in enumerate(self.said) if READY in line), times)
            return next((entry for entry in self.said[since + 1 :] if WELL not in entry[1]), None)

    def wait_ready(self, times: int, timeout_s: float) -> float:
        """When it said `ready` for this time. Raises RuntimeError with what it said instead."""
        with self._changed:
            self._changed.wait_for(lambda: self.times(READY) >= times or self.process.poll() is not None, timeout_s)
            ready = [when for when, line in self.said if READY in line]
            if len(ready) < times:
                raise RuntimeError("not ready:\n" + "\n".join(line for _, line in self.said))
            self.shm_prefixes |= {self.shm_prefix()}
            return ready[times - 1]

    def __enter__(self) -> Served:
        self.wait_ready(1, 600.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, timeout_s: float = 90.0) -> int:
        """Exit code of a drain; a second signal after the timeout."""
        for patience_s in (timeout_s, 20.0):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            try:
                return self.process.wait(patience_s)
            except subprocess.TimeoutExpired:
                continue
        self.process.kill()
        return self.process.wait()

    def signal_model(self, model: str, number: signal.Signals) -> bool:
        """For the process of one model; False when there is none."""
        pids = [pid for pid, name in stub_models(self.triton_pid()).items() if name == model]
        if pids:
            os.kill(pids[0], number)
        return bool(pids)

    def triton_pid(self) -> int:
        """The binary is the only child of the guardian, which is the only child of `tritandem serve`."""
        [guardian] = _children(self.process.pid)
        [triton] = _children(guardian)
        return triton

    def shm_prefix(self) -> str:
        words = (PROC / str(self.triton_pid()) / "cmdline").read_bytes().decode(errors="replace")
        found = _SHM_PREFIX.search(words)
        return found[1] if found else "none"

    def memory(self) -> Memory | None:
        """None while the server is being replaced."""
        try:
            pid = self.triton_pid()
            processes = {"tritonserver": pid, **{name: stub for stub, name in stub_models(pid).items()}}
            private = {name: private_mb(one) for name, one in processes.items()}
            return Memory(private, shared_mb(self.shm_prefix()))
        except (OSError, ValueError):
            return None

    def leftover_shm(self) -> list[str]:
        """Regions of any run that has ended."""
        return [path.name for prefix in self.shm_prefixes for path in SHM.glob(f"{prefix}*")]

    def metrics(self) -> str:
        """The page, "" when it cannot be had."""
        try:
            with urllib.request.urlopen(self._metrics_url, timeout=5) as response:
                return str(response.read().decode())
        except (OSError, urllib.error.URLError):
            return ""


def outcome_counts(page: str) -> Counter[str]:
    """Finished requests by outcome, from a metrics page."""
    counts: Counter[str] = Counter()
    for line in page.splitlines():
        if found := _OUTCOME_METRIC.match(line):
            counts[found[1]] += int(found[2])
    return counts


def gauge(page: str, name: str) -> float:
    """The value of a metric without labels; nan when it is not there."""
    for line in page.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    return float("nan")


def request_lines(log: Path) -> list[list[dict[str, Any]]]:
    """What the server wrote about every request that ended, run by run. Triton may wrap a line into a JSON string."""
    runs: list[list[dict[str, Any]]] = [[]]
    for line in log.read_text(errors="replace").splitlines():
        if STARTED in line:
            runs.append([])
        found = _REQUEST_LINE.search(line)
        if found is None:
            continue
        text = json.loads(f'"{found[1]}"') if found[1].startswith('{\\"') else found[1]
        document = json.loads(text)
        if document.get("event") == "request":
            runs[-1].append(document)
    return runs


def _children(pid: int) -> list[int]:
    return [int(child) for task in (PROC / str(pid) / "task").glob("*/children") for child in task.read_text().split()]
