"""The machine without a server: has it cores to spare for one? A pure function of two readings, and the reading."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tritandem.machine.cgroup import ROOT
from tritandem.machine.pressure import read_machine

from .verdict import HIGH_BUSY_SHARE, HIGH_THROTTLED_SHARE, Diagnosis, Finding, Severity, Verdict

HIGH_PRESSURE_SHARE = 0.3
QUIET_BUSY_SHARE = 0.1
NEEDED_CORES = 1.0  # free, for the smallest server; half of a machine that has one


@dataclass(frozen=True, slots=True)
class MachineSample:
    """Totals of the cores that this process may use; None where the kernel does not tell."""

    at_s: float
    cores: int
    idle_s: float  # sum over the cores
    pressure_s: float | None
    throttled_s: float | None


@dataclass(frozen=True, slots=True)
class MachineSignals:
    """What two readings say of the time between; None where the kernel does not tell."""

    seconds: float
    cores: int
    busy_share: float
    pressure_share: float | None
    throttled_share: float | None


def judge_machine(before: MachineSample, after: MachineSample) -> Diagnosis:
    seconds = after.at_s - before.at_s
    idle = (after.idle_s - before.idle_s) / (seconds * after.cores)
    busy_share = min(1.0, max(0.0, 1.0 - idle))  # idle time is counted in ticks of 10 ms
    pressure = _share(before.pressure_s, after.pressure_s, seconds)
    throttled = _share(before.throttled_s, after.throttled_s, seconds)
    free_cores = (1.0 - busy_share) * after.cores
    short = busy_share >= HIGH_BUSY_SHARE or (pressure or 0.0) >= HIGH_PRESSURE_SHARE
    short = short or free_cores < min(NEEDED_CORES, after.cores / 2)
    change: tuple[str, ...] = ()
    if (throttled or 0.0) >= HIGH_THROTTLED_SHARE:
        verdict, severity = Verdict.CORES, Severity.CRITICAL
        because = f"the CPU quota stops this container {throttled:.0%} of the time"
        change = ("raise the container's CPU limit, or set a request and no limit",)
    elif short:
        verdict, severity = Verdict.CORES, Severity.WARNING
        because = f"other work takes {busy_share:.0%} of the {after.cores} cores that a server could use"
        change = ("move that work, or give the server cores of its own: `tritandem size` says how many",)
    else:
        verdict = Verdict.IDLE if busy_share < QUIET_BUSY_SHARE else Verdict.UNHINDERED
        severity = Severity.OK
        because = f"{1 - busy_share:.0%} of {after.cores} cores are free for a server"
    signals = MachineSignals(seconds, after.cores, busy_share, pressure, throttled)
    return Diagnosis(Finding(verdict, severity, because, change), (), signals)


def read(root: Path = ROOT) -> MachineSample:
    """Raises OSError on a system without /proc."""
    cores = os.sched_getaffinity(0)
    machine = read_machine(root)
    return MachineSample(
        time.monotonic(), len(cores), _idle_s(root / "proc", cores), machine.pressure_s, machine.throttled_s
    )


def _idle_s(proc: Path, cores: Collection[int]) -> float:
    """Idle and waiting for disks, of these cores."""
    ticks = 0
    for line in (proc / "stat").read_text().splitlines():
        name, *columns = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            ticks += int(columns[3]) + int(columns[4])
    return ticks / os.sysconf("SC_CLK_TCK")


def _share(before: float | None, after: float | None, seconds: float) -> float | None:
    return None if before is None or after is None else (after - before) / seconds
