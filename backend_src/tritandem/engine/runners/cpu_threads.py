"""How many threads torch computes with: what this process may use, never more.

Too many are far worse than too few: the threads of one product wait for each other, and for whoever is busy
on their core.
"""

from __future__ import annotations

import os

import torch

from ...machine.cgroup import quota_cores
from ...machine.topology import usable_cores


def limit_threads(configured: int, ranks: int = 1) -> int:
    """Set and return torch's intra-op threads; 0: the usable cores less one for the server, at least 1. Of several
    ranks each gets its share of them."""
    threads = configured or max(1, usable_cores(len(os.sched_getaffinity(0)), quota_cores()) - 1)
    threads = max(1, threads // ranks)
    torch.set_num_threads(threads)
    return threads
