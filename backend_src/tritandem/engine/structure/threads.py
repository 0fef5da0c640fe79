"""The threads that write masks, once a process."""

from __future__ import annotations

import os
from functools import cache

from ...grammar.compiled import MaskPool
from ...machine.cgroup import quota_cores
from ...machine.topology import usable_cores

MOST_THREADS = 8  # 256 masks are a few milliseconds of one


@cache
def mask_pool() -> MaskPool:
    """Its threads run where the thread may run that asks first. The one that launches steps may have a core of its own:
    not that one, where another can."""
    return MaskPool(min(MOST_THREADS, usable_cores(len(os.sched_getaffinity(0)), quota_cores())))
