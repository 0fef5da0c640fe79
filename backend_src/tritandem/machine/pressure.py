"""Is the CPU short? Reads what the kernel knows about a process, its cgroup and the machine.

Sources: /proc/PID/stat (CPU time), /proc/PID/task/*/schedstat (run-queue wait), cpu.pressure of the cgroup or
/proc/pressure/cpu (pressure stall information), cpu.stat of the cgroup, version 2 or 1 (throttling). A source that a
kernel does not offer reads as None; nothing here raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

_AFFINITY_EVERY = 10  # readings; placement happens at start, and asking every thread costs
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
T = TypeVar("T")


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


def cores_of(server: int, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Cores that process `server` and its children may use together, at most what the cgroup's quota allows.

    A child that pins itself narrows nothing for the others. None where the process is gone.
    """
    allowed: set[int] = set()
    for pid in (str(server), *_children(proc / str(server))):
        allowed |= _reading(lambda pid=pid: os.sched_getaffinity(int(pid))) or set()  # type: ignore[misc]
    quota = _reading(lambda: _quota_cores(_cgroup_folder(proc, cgroup)))
    if not allowed:
        return None
    return float(len(allowed)) if quota is None else min(float(len(allowed)), quota)


def _children(folder: Path) -> list[str]:
    found: list[str] = []
    for task in _reading(lambda: list((folder / "task").iterdir())) or ():
        found += _reading(lambda task=task: (task / "children").read_text().split()) or ()  # type: ignore[misc]
    return found


def _quota_cores(folder: Path) -> float:
    """Raises ValueError when there is none ("max")."""
    quota_us, period_us = (folder / "cpu.max").read_text().split()
    return int(quota_us) / int(period_us)


@dataclass(frozen=True, slots=True)
class MachineReading:
    """Totals since start; None where the kernel does not tell."""

    pressure_s: float | None  # some task of the cgroup (or machine) waited for a core
    throttled_s: float | None  # the cgroup's quota was used up


def read_machine(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> MachineReading:
    """One reading for the cgroup of this process."""
    pressure_s = _reading(lambda: _some_total_s(_cgroup_folder(proc, cgroup) / "cpu.pressure"))
    if pressure_s is None:
        pressure_s = _reading(lambda: _some_total_s(proc / "pressure" / "cpu"))
    throttled_s = _reading(lambda: _cpu_stat(_cgroup_folder(proc, cgroup))["throttled_usec"] / 1e6)
    if throttled_s is None:
        throttled_s = _reading(lambda: _cpu_stat(_version_1_folder(proc, cgroup))["throttled_time"] / 1e9)
    return MachineReading(pressure_s, throttled_s)


def _reading(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (OSError, ValueError, IndexError, KeyError, StopIteration):
        return None


def _contents(path: str) -> bytes:
    file = os.open(path, os.O_RDONLY)
    try:
        return os.read(file, 256)
    finally:
        os.close(file)


def _cgroup_folder(proc: Path, cgroup: Path) -> Path:
    line = next(line for line in _cgroups(proc) if line.startswith("0::"))
    return cgroup / line[3:].lstrip("/")


def _version_1_folder(proc: Path, cgroup: Path) -> Path:
    line = next(line for line in _cgroups(proc) if "cpu" in line.split(":")[1].split(","))
    return cgroup / "cpu" / line.split(":", 2)[2].lstrip("/")


def _cgroups(proc: Path) -> list[str]:
    return (proc / "self" / "cgroup").read_text().splitlines()


def _some_total_s(path: Path) -> float:
    line = next(line for line in path.read_text().splitlines() if line.startswith("some"))
    return int(line.rsplit("total=", 1)[1]) / 1e6


def _cpu_stat(folder: Path) -> dict[str, int]:
    return {key: int(value) for key, value in (line.split() for line in (folder / "cpu.stat").read_text().splitlines())}
