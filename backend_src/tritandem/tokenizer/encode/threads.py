"""How many threads the tokenizer uses, from the cores this process may run on.

Pure functions of the core count, and the switches of the engines' own pools. Parallelism comes from our threads:
Rayon's pool has one queue, where a short text waits for every piece of a long one that came before. A second thread
inside fastokens saves nothing on texts of 114k tokens and costs a core that waits for the first in a loop.
"""

from __future__ import annotations

import os

from ...machine.cgroup import quota_cores
from ...machine.topology import usable_cores

ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "FASTOKENS_BPE_THREADS": "1"}


def cores_given() -> int:
    """What this process may use at once: its affinity mask under the container's quota, not the machine's cores."""
    return usable_cores(len(os.sched_getaffinity(0)), quota_cores())


def encode_threads(configured: int, cores: int) -> int:
    """Threads for long texts: as configured, else one per core, at most eight (more add nothing to one text)."""
    return configured if configured > 0 else max(1, min(cores, 8))


def use_own_threads_only() -> None:
    """Keep both engines from starting pools, unless the environment already says what they should do.

    Both read this when they first encode.
    """
    for name, value in ONE_THREAD.items():
        os.environ.setdefault(name, value)
