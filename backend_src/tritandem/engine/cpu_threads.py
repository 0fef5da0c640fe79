"""How many threads torch computes with: what this process may use, never more.

Too many are far worse than too few: the threads of one product wait for each other, and for whoever is busy
on their core.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "quota period" in microseconds, or "max period"


def usable_cores(affinity: int, quota_file: Path = CGROUP_QUOTA) -> int:
    """Whole cores of a process that may run on `affinity` of them, under the container's quota if it has one."""
    try:
        quota, period = quota_file.read_text().split()
    except (OSError, ValueError):
        return affinity
    return affinity if quota == "max" else max(1, min(affinity, int(quota) // int(period)))


def limit_threads(configured: int) -> int:
    """Set and return torch's intra-op threads; 0: the usable cores less one for the server, at least 1."""
    threads = configured or max(1, usable_cores(len(os.sched_getaffinity(0))) - 1)
    torch.set_num_threads(threads)
    return threads
