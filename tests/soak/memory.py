"""What a server consists of and holds: its processes, their private memory, its regions in /dev/shm, and how they
change."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tritandem.server.health import stub_models

PROC, SHM = Path("/proc"), Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Memory:
    """Megabytes: anonymous resident memory of every process by model, and what is in use of /dev/shm."""

    private: dict[str, float]
    shared: float

    @property
    def total_private(self) -> float:
        return sum(self.private.values())


@dataclass(frozen=True, slots=True)
class Growth:
    """Megabytes; `private_mb` is the sum over `by_process`."""

    private_mb: float
    shared_mb: float
    by_process: dict[str, float]


def growth(samples: Sequence[Memory], edge: int) -> Growth:
    """From the median of the first `edge` samples to that of the last; the halves when there are fewer."""
    edge = max(1, min(edge, len(samples) // 2))
    first, last = samples[:edge], samples[-edge:]

    def change(values: Sequence[float], old_values: Sequence[float]) -> float:
        return round(statistics.median(values) - statistics.median(old_values), 1)

    by_process = {
        name: change([one.private.get(name, 0.0) for one in last], [one.private.get(name, 0.0) for one in first])
        for name in last[-1].private
    }
    shared_mb = change([one.shared for one in last], [one.shared for one in first])
    return Growth(round(sum(by_process.values()), 1), shared_mb, by_process)


def children(pid: int) -> list[int]:
    return [int(child) for task in (PROC / str(pid) / "task").glob("*/children") for child in task.read_text().split()]


def stub_pids(server_pid: int) -> dict[str, int]:
    """Model name -> process id of its Python stub; the last instance where there are several."""
    return {model: pid for pid, model in stub_models(server_pid).items()}


def memory_of(server_pid: int, shm_prefix: str) -> Memory:
    """Of tritonserver, each stub and their shared memory. Raises OSError or ValueError when a process has ended."""
    processes = {"tritonserver": server_pid, **stub_pids(server_pid)}
    return Memory({name: private_mb(pid) for name, pid in processes.items()}, shared_mb(shm_prefix))


def private_mb(pid: int) -> float:
    """Raises OSError or ValueError when the process has ended."""
    for line in (PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1e3
    raise ValueError(f"process {pid} has ended")


def shared_mb(prefix: str) -> float:
    """Pages in use, not the sizes that sparse files claim."""
    return sum(os.stat(path).st_blocks * 512 for path in SHM.glob(f"{prefix}*")) / 1e6
