"""Is the CPU short? Reads what the kernel knows about this process, its cgroup and the machine.

Sources: /proc/self/task/*/schedstat (run-queue wait), /proc/pressure/cpu and the cgroup's cpu.pressure
(pressure stall information), cgroup cpu.stat (throttling), getrusage. A source that a kernel does not offer
reads as None; nothing here raises. Any thread.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Totals since the process (or machine) started, seconds; None where the kernel does not tell."""

    process_cpu_s: float
    run_queue_wait_s: float | None
    pressure_s: float | None  # some task of the cgroup (or machine) waited for a core
    throttled_s: float | None
    resident_bytes: int
    cores_allowed: int


def read_cpu(pid: int | None = None, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> CpuReading:
    """One reading of this process, or of process `pid`."""
    own = proc / ("self" if pid is None else str(pid))
    if pid is None:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = usage.ru_utime + usage.ru_stime
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cpu_s = _reading(lambda: _stat_cpu_s(own / "stat")) or 0.0
        cores = _reading(lambda: float(len(os.sched_getaffinity(pid)))) or 0.0
    return CpuReading(
        process_cpu_s=cpu_s,
        run_queue_wait_s=_reading(lambda: _run_queue_wait_s(own)),
        pressure_s=_pressure_s(own, proc, cgroup),
        throttled_s=_reading(lambda: _throttled_s(_cgroup_folder(own, cgroup))),
        resident_bytes=int(_reading(lambda: int((own / "statm").read_text().split()[1]) * _PAGE_BYTES) or 0),
        cores_allowed=int(cores),
    )


def _reading(read: Callable[[], float]) -> float | None:
    try:
        return read()
    except (OSError, ValueError, IndexError, KeyError, StopIteration):
        return None


def _stat_cpu_s(path: Path) -> float:
    fields = path.read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _run_queue_wait_s(own: Path) -> float:
    total_ns = 0
    for task in (own / "task").iterdir():
        total_ns += int((task / "schedstat").read_text().split()[1])
    return total_ns / 1e9


def _cgroup_folder(own: Path, cgroup: Path) -> Path:
    line = next(line for line in (own / "cgroup").read_text().splitlines() if line.startswith("0::"))
    return cgroup / line[3:].lstrip("/")


def _pressure_s(own: Path, proc: Path, cgroup: Path) -> float | None:
    inside = _reading(lambda: _some_total_s(_cgroup_folder(own, cgroup) / "cpu.pressure"))
    return inside if inside is not None else _reading(lambda: _some_total_s(proc / "pressure" / "cpu"))


def _some_total_s(path: Path) -> float:
    line = next(line for line in path.read_text().splitlines() if line.startswith("some"))
    return int(line.rsplit("total=", 1)[1]) / 1e6


def _throttled_s(folder: Path) -> float:
    values = dict(line.split() for line in (folder / "cpu.stat").read_text().splitlines())
    return int(values["throttled_usec"]) / 1e6
