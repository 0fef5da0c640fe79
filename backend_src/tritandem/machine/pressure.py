"""Is the CPU short? What the kernel counts for the group of this process, or else for the whole machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import cgroup


@dataclass(frozen=True, slots=True)
class MachineReading:
    """Totals since start; None where the kernel does not tell."""

    pressure_s: float | None  # some task of the group (or machine) waited for a core
    throttled_s: float | None  # the group's quota was used up


def read_machine(root: Path = cgroup.ROOT) -> MachineReading:
    """One reading."""
    pressure_s = cgroup.pressure_s(root)
    if pressure_s is None:
        pressure_s = cgroup.some_total_s(root / "proc/pressure/cpu")
    return MachineReading(pressure_s, cgroup.throttled_s(root))
