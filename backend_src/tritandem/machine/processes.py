"""Processes: whose children they are, whether they run, what they use of the CPU and how long they wait for it.

Sources: /proc/PID/stat (CPU time), /proc/PID/task/*/schedstat (run-queue wait), /proc/PID/task/*/children. A source
that a kernel does not offer reads as None.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .cgroup import ROOT, quota_cores
from .cpu_list import parse_cpus

PROC = Path("/proc")
PR_SET_PDEATHSIG = 1
_AFFINITY_EVERY = 10  # readings; placement happens at start, and asking every thread costs
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
T = TypeVar("T")


def children(pid: int, proc: Path = PROC) -> list[int]:
    """Of every thread of process `pid`; none of one that is gone."""
    found: list[int] = []
    for task in (proc / str(pid) / "task").glob("*/children"):
        found += map(int, _reading(lambda task=task: task.read_text().split()) or ())  # type: ignore[misc]
    return found


def end_with_parent() -> None:
    """The kernel ends this process when the thread that made it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def state(pid: int, proc: Path = PROC) -> str:
    """The kernel's letter (T: stopped by a signal, Z: ended and not yet reaped); X: there is none any more."""
    return _reading(lambda: (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]) or "X"


def command_line(pid: int, proc: Path = PROC) -> list[str]:
    """The words that the process was started with; none of one that is gone."""
    text = _reading(lambda: (proc / str(pid) / "cmdline").read_bytes().decode(errors="surrogateescape"))
    return text.rstrip("\0").split("\0") if text else []


def placement(folder: Path) -> tuple[str, frozenset[int]] | None:
    """(name, CPUs that it may use) of the process or thread with this folder in /proc; None of one that is gone."""
    lines = _reading(lambda: (folder / "status").read_text().splitlines())
    if lines is None:
        return None
    fields = dict(line.split(":", 1) for line in lines)
    return fields["Name"].strip(), parse_cpus(fields["Cpus_allowed_list"])


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """Totals since the process started; None where the kernel does not tell."""

    cpu_s: float | None
    run_queue_wait_s: float | None  # of all threads seen so far, ended ones included
    resident_bytes: int | None
    cores_allowed: int | None


class ProcessWatch:
    """One process: this one, or `pid`. One thread at a time."""

    def __init__(self, pid: int | None = None, proc: Path = Path("/proc")) -> None:
        self._pid = os.getpid() if pid is None else pid
        self._folder = proc / str(self._pid)
        self._cores: int | None = None
        self._readings = 0
        self._wait_ns: dict[str, int] = {}  # of each thread that lives
        self._ended_wait_ns = 0

    def read(self) -> ProcessReading:
        threads = _reading(lambda: os.listdir(self._folder / "task")) or []
        if self._readings % _AFFINITY_EVERY == 0 or not threads:
            self._cores = _allowed_cores(threads)
        self._readings += 1
        return ProcessReading(
            cpu_s=_reading(self._cpu_s),
            run_queue_wait_s=self._run_queue_wait_s(threads),
            resident_bytes=_reading(lambda: int((self._folder / "statm").read_text().split()[1]) * _PAGE_BYTES),
            cores_allowed=self._cores,
        )

    def waited_s(self) -> float | None:
        """The run-queue wait alone, as `read` gives it."""
        return self._run_queue_wait_s(_reading(lambda: os.listdir(self._folder / "task")) or [])

    def _cpu_s(self) -> float:
        fields = (self._folder / "stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S

    def _run_queue_wait_s(self, threads: Sequence[str]) -> float | None:
        """The kernel forgets a thread's wait when it ends: what was last seen of it is kept."""
        found: dict[str, int] = {}
        for thread in threads:
            # Servers have hundreds of threads: no objects but the text.
            text = _reading(lambda thread=thread: _contents(f"{self._folder}/task/{thread}/schedstat"))  # type: ignore[misc]
            if text is not None:
                found[thread] = int(text.split(None, 2)[1])
        if not found:
            return None
        for thread, wait_ns in self._wait_ns.items():
            # A number that fell belongs to a new thread with an old one's id.
            if found.get(thread, -1) < wait_ns:
                self._ended_wait_ns += wait_ns
        self._wait_ns = found
        return (self._ended_wait_ns + sum(found.values())) / 1e9


def _allowed_cores(threads: Iterable[str]) -> int | None:
    """The cores that any of the threads may use: placement gives threads of one process different ones."""
    allowed: set[int] = set()
    for thread in threads:
        allowed |= _reading(lambda thread=thread: os.sched_getaffinity(int(thread))) or set()  # type: ignore[misc]
    return len(allowed) or None


def cores_of(server: int, root: Path = ROOT) -> float | None:
    """Cores that process `server` and its children may use together, at most what the quota allows.

    A child that pins itself narrows nothing for the others. None where the process is gone.
    """
    allowed: set[int] = set()
    for pid in (server, *children(server, root / "proc")):
        allowed |= _reading(lambda pid=pid: os.sched_getaffinity(pid)) or set()  # type: ignore[misc]
    quota = quota_cores(root)
    if not allowed:
        return None
    return float(len(allowed)) if quota is None else min(float(len(allowed)), quota)


def _reading(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (OSError, ValueError, IndexError):
        return None


def _contents(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 256)
    finally:
        os.close(file)
