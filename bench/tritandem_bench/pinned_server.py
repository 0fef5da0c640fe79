"""A server process pinned to some cores, and what it and the GPU do while it is under load. Linux only.

Knows nothing about the load. A sampler thread reads /proc and nvidia-smi once a second.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tritandem.machine.cgroup import some_total_s

PRESSURE = Path("/proc/pressure/cpu")
_SAMPLE_S = 1.0
_STOP_S = 60.0


class ServerFailed(Exception):
    """The server ended or did not become ready; the text says where its log is."""


class PinnedServer:
    """`with PinnedServer(command, cores, ready_url, log)`: started on `cores`, ready inside, ended after."""

    def __init__(
        self, command: str, cores: Sequence[int], ready_url: str, log: Path, patience_s: float = 600.0
    ) -> None:
        self._command, self._cores, self._ready_url = command, set(cores), ready_url
        self._log, self._patience_s = log, patience_s

    def __enter__(self) -> PinnedServer:
        with self._log.open("w", encoding="utf-8") as log:
            # taskset is inherited by every process and thread that the command starts.
            listed = ",".join(map(str, sorted(self._cores)))
            command = ["taskset", "-c", listed, "bash", "-c", f"exec {self._command}"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """SIGTERM to the server alone, so that it can drain; what is left of its group after a minute is killed."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)

    def _wait_ready(self) -> None:
        give_up_at = time.monotonic() + self._patience_s
        while time.monotonic() < give_up_at:
            if self._process.poll() is not None:
                raise ServerFailed(f"the server ended with code {self._process.returncode}; log: {self._log}")
            try:
                with urllib.request.urlopen(self._ready_url, timeout=2) as answer:
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                pass
            time.sleep(0.5)
        raise ServerFailed(f"not ready after {self._patience_s:g} s; log: {self._log}")

    def move_to(self, cores: Sequence[int]) -> None:
        """Pin every thread of the running server to `cores`; threads that it starts later inherit them."""
        for _ in range(2):  # a thread that was being born in the first round is there in the second
            for process in self.tree():
                for task in Path(f"/proc/{process.pid}/task").glob("*"):
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.sched_setaffinity(int(task.name), cores)

    def tree(self) -> list[psutil.Process]:
        """The server and its children, as far as they still run."""
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@dataclass
class Load:
    """What `LoadSampler` saw between start and stop, means over that time. None: cannot be read here."""

    cpu_cores_used: float | None = None
    cpu_cores_waited: float | None = None  # threads of the server that were ready to run but had no core
    cpu_pressure: float | None = None  # the kernel's share of time in which some task of the host waited
    gpu_percent: float | None = None
    gpu_samples: list[float] = field(default_factory=list)


class LoadSampler:
    """`with LoadSampler(server) as load:`; after the block the figures of `load` are set."""

    def __init__(self, server: PinnedServer, skip_s: float) -> None:
        self._server, self._skip_s = server, skip_s
        self._done = threading.Event()
        self.load = Load()

    def __enter__(self) -> Load:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self.load

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(30)

    def _run(self) -> None:
        if self._done.wait(self._skip_s):
            return
        before, began = self._counters(), time.monotonic()
        after, at = before, began
        while not self._done.wait(_SAMPLE_S):
            after, at = self._counters(), time.monotonic()
            self.load.gpu_samples += gpu_utilisation()
        elapsed_s = at - began
        if elapsed_s <= 0:
            return
        used, waited, pressure = ((b - a) / elapsed_s for a, b in zip(before, after, strict=True))
        self.load.cpu_cores_used, self.load.cpu_cores_waited = round(used, 3), round(waited, 3)
        self.load.cpu_pressure = round(pressure, 4) if PRESSURE.exists() else None
        if self.load.gpu_samples:
            self.load.gpu_percent = round(sum(self.load.gpu_samples) / len(self.load.gpu_samples), 1)

    def _counters(self) -> tuple[float, float, float]:
        """Seconds: on a core, waiting for one (both of the server's threads), and the host's pressure."""
        on_cpu_ns = waiting_ns = 0
        for process in self._server.tree():
            for stat in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                try:
                    ran, waited, _ = stat.read_text().split()
                except (OSError, ValueError):
                    continue  # the thread has just ended
                on_cpu_ns, waiting_ns = on_cpu_ns + int(ran), waiting_ns + int(waited)
        return on_cpu_ns / 1e9, waiting_ns / 1e9, some_total_s(PRESSURE) or 0.0


def gpu_utilisation() -> list[float]:
    """Percent of each GPU's time with a kernel running, by nvidia-smi; empty without one."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    done: Any = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    return [float(line) for line in done.stdout.splitlines() if line.strip().isdigit()]
