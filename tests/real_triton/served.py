"""`tritandem serve` as a child process, and clients that stream from it until something happens."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from tritandem_client import Client

LONG = {"max_tokens": 4000, "sampling_parameters": {"ignore_eos": True}}
ENDED = "no more is said"
WAYS = [(protocol, model) for protocol in ("grpc", "http") for model in ("scheduler", "ensemble")]


class Served:
    """`lines` are what it said; entering waits until it is ready for the first time."""

    def __init__(self, model: Path, ports: list[int], *flags: str) -> None:
        http, grpc, metrics = ports
        self.http_url, self.grpc_url = f"127.0.0.1:{http}", f"127.0.0.1:{grpc}"
        self.lines: list[str] = []
        self._said: queue.Queue[str] = queue.Queue()
        words = ["serve", "--model", str(model), "--http-port", str(http), "--grpc-port", str(grpc)]
        words += ["--metrics-port", str(metrics), *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tritandem.cli", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            self._said.put(line)
        self._said.put(ENDED)

    def wait_said(self, words: str, timeout_s: float) -> str:
        """The next line that holds `words`."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                line = self._said.get(timeout=max(0.0, end_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"not said within {timeout_s} s: {words!r}\n" + "\n".join(self.lines)) from None
            assert line != ENDED, f"ended without saying {words!r}\n" + "\n".join(self.lines)
            if words in line:
                return line

    def ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://{self.http_url}/v2/health/ready", timeout=2) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def url(self, protocol: str) -> str:
        return self.grpc_url if protocol == "grpc" else self.http_url

    def client(self, protocol: str = "grpc", model: str = "scheduler") -> Client:
        return Client(self.url(protocol), protocol=protocol, model=model, timeout_s=120)

    def triton_pid(self) -> int:
        """The binary is the only child of the guardian, which is the only child of `tritandem serve`."""
        [guardian] = children(self.process.pid)
        [triton] = children(guardian)
        return triton

    def mark(self) -> str:
        """What the names of this run's files in /dev/shm begin with."""
        words = Path(f"/proc/{self.triton_pid()}/cmdline").read_text()
        return words.partition("shm-region-prefix-name=")[2].partition("\0")[0]

    def log(self) -> str:
        """Of Triton, the newest run."""
        [*_, path] = [line.rpartition("log: ")[2] for line in self.lines if "starting Triton" in line]
        return Path(path).read_text(errors="replace")

    def __enter__(self) -> Served:
        self.wait_said("ready: ", 600)
        return self

    def __exit__(self, *_: object) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(150)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(20)
        self._listener.join()
        assert self.process.stdout is not None
        self.process.stdout.close()


def children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


@dataclass
class Reader:
    """One client in the middle of an answer. `ended_s` is when its stream ended, `error` how; None: well."""

    served: Served
    protocol: str
    model: str
    options: dict[str, object] = field(default_factory=lambda: dict(LONG))
    started: threading.Event = field(default_factory=threading.Event)
    ended_s: float = 0.0
    error: Exception | None = None
    tokens: int = 0

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            with self.served.client(self.protocol, self.model) as client:
                for chunk in client.stream("1, 2, 3, 4,", **self.options):
                    self.tokens += chunk.num_output_tokens
                    self.started.set()
        except Exception as error:
            self.error = error
        self.ended_s = time.monotonic()
        self.started.set()


def readers(served: Served, count: int, **options: object) -> list[Reader]:
    """So many clients on every way, all of them streaming."""
    made = [Reader(served, *way, options=options or dict(LONG)) for way in WAYS for _ in range(count)]
    for reader in made:
        assert reader.started.wait(60)
        assert reader.error is None, reader.error
    return made
