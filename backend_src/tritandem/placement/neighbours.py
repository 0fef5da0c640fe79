"""Is another server pinned to the same CPUs? Two plans of the same machine are the same plan.

Sees servers of this PID namespace. Those of other containers are told apart by what only the operator knows: give each
container CPUs of its own, or a GPU of its own.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path

from ..machine.cpu_list import parse_cpus

PROGRAM = "tritonserver"  # as the kernel calls it


def another_server_on(cpus: Set[int], proc: Path = Path("/proc")) -> bool:
    """Whether some Triton runs pinned to exactly these CPUs."""
    for entry in proc.glob("[0-9]*"):
        try:
            if (entry / "comm").read_text().strip() != PROGRAM:
                continue
            lines = (entry / "status").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        mask = next((line.split(":", 1)[1] for line in lines if line.startswith("Cpus_allowed_list")), "")
        if parse_cpus(mask) == cpus:
            return True
    return False
