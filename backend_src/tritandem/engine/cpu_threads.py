"""How many threads torch computes with: what this process may use, never more.

Too many are far worse than too few: threads of one product wait for each other, and for a busy neighbour.
"""

from __future__ import annotations

import os

import torch


def limit_threads(configured: int) -> int:
    """Set and return torch's intra-op threads; 0: the cores of this process less one for the server, at least 1."""
    cores = len(os.sched_getaffinity(0))
    threads = configured or max(1, cores - 1)
    torch.set_num_threads(threads)
    return threads
