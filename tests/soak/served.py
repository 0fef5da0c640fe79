"""`tritandem serve` as a child process, seen from outside: what it says, its processes, memory and metrics.

Owns the child. Reads /proc and /dev/shm; changes nothing on the server but what `signal_model`
and `stop` do.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from tritandem_client import Client

from .memory import PROC, SHM, Memory, children, memory_of, stub_pids

READY = "ready: "
WELL = "] try: "  # in a line that only follows `ready`
START_TIMEOUT_S = 600.0
_SHM_PREFIX = re.compile(r"shm-region-prefix-name=(\w+)")


class Served:
    """Entering waits for the first `ready`. `said` holds (seconds, line) of everything it said."""

    def __init__(self, ports: Sequence[int], *words: str) -> None:
        """`ports`: HTTP, gRPC, metrics; `words`: further flags of `tritandem serve`."""
        http, grpc, metrics = ports
        self.http_url, self.grpc_url = f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        self._metrics_url = f"http://127.0.0.1:{metrics}/metrics"
        flags = ["--http-port", str(http), "--grpc-port", str(grpc), "--metrics-port", str(metrics)]
        flags += ["--openai-port", "0", *words]
        self.said: list[tuple[float, str]] = []
        self._heard = 0  # lines that were waited for
        self._silent = False  # nothing more will be said
        self._changed = threading.Condition()
        self.shm_prefixes: set[str] = set()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tritandem.cli", "serve", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                with self._changed:
                    self.said.append((time.monotonic(), line.rstrip()))
                    self._changed.notify_all()
        with self._changed:
            self._silent = True
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
            self._changed.wait_for(lambda: self._silent or self.times(READY) >= times, timeout_s)
            places = [at for at, (_, line) in enumerate(self.said) if READY in line]
            if len(places) < times:
                raise RuntimeError("not ready:\n" + self.words())
            place = places[times - 1]
            self._heard = max(self._heard, place + 1)
            self.shm_prefixes.add(self.shm_prefix())
            return self.said[place][0]

    def wait_said(self, words: str, timeout_s: float) -> str:
        """The next line that holds `words`, of those not waited for before. Raises RuntimeError as `wait_ready`."""

        def place() -> int | None:
            lines = range(self._heard, len(self.said))
            return next((at for at in lines if words in self.said[at][1]), None)

        with self._changed:
            self._changed.wait_for(lambda: self._silent or place() is not None, timeout_s)
            if (at := place()) is None:
                raise RuntimeError(f"not said: {words!r}\n" + self.words())
            self._heard = at + 1
            return self.said[at][1]

    def words(self) -> str:
        return "\n".join(line for _, line in self.said)

    def __enter__(self) -> Served:
        try:
            self.wait_ready(1, START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, timeout_s: float = 150.0) -> int:
        """Exit code of a drain; a second signal after the timeout."""
        for patience_s in (timeout_s, 20.0):
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            try:
                code = self.process.wait(patience_s)
                break
            except subprocess.TimeoutExpired:
                continue
        else:
            self.process.kill()
            code = self.process.wait()
        self._listener.join(20.0)
        return code

    def signal_model(self, model: str, number: signal.Signals) -> bool:
        """For the process of one model; False when there is none."""
        pid = stub_pids(self.triton_pid()).get(model)
        if pid is not None:
            os.kill(pid, number)
        return pid is not None

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http_url}/v2/health/ready", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def url(self, protocol: str) -> str:
        return self.grpc_url if protocol == "grpc" else self.http_url

    def client(self, protocol: str = "grpc", model: str = "scheduler") -> Client:
        return Client(self.url(protocol), protocol=protocol, model=model, timeout_s=120)  # type: ignore[arg-type]

    @property
    def log(self) -> Path:
        """Triton's, of the newest run."""
        [*_, path] = [line.rpartition("log: ")[2] for _, line in self.said if "starting Triton" in line]
        return Path(path)

    def triton_pid(self) -> int:
        """The binary is the only child of the guardian, which is the only child of `tritandem serve`."""
        [guardian] = children(self.process.pid)
        [triton] = children(guardian)
        return triton

    def shm_prefix(self) -> str:
        """What the names of this run's files in /dev/shm begin with."""
        words = (PROC / str(self.triton_pid()) / "cmdline").read_bytes().decode(errors="replace")
        found = _SHM_PREFIX.search(words)
        return found[1] if found else "none"

    def memory(self) -> Memory | None:
        """None while the server is being replaced."""
        try:
            return memory_of(self.triton_pid(), self.shm_prefix())
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
