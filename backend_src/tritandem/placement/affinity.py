"""Pinning, and reading it back. Linux only, like everything here.

A new thread inherits the mask of the one that starts it; those that run already are set one by one.
"""

from __future__ import annotations

import os
from collections.abc import Set
from pathlib import Path

from ..machine.cpu_list import format_cpus
from ..machine.processes import PROC, placement

PROGRAM = "tritonserver"  # as the kernel calls it
# Threads that start while others are being set are found in another round.
ROUNDS = 3


def settle(cpus: Set[int]) -> str:
    """Keep this whole process on `cpus`. Returns "", or why that cannot be: a sandbox may forbid it, which is no reason
    not to serve."""
    try:
        if any(mask != cpus for _, mask in process_affinities(os.getpid()).values()):
            pin_process(cpus)
    except OSError as error:
        return f"cannot be pinned to CPUs {format_cpus(cpus)}: {error.strerror}"
    return ""


def pin_process(cpus: Set[int], pid: int = 0) -> None:
    """Let every thread of process `pid` (0: this one) run on `cpus` only. Raises OSError."""
    pid = pid or os.getpid()
    done: set[int] = set()
    for _ in range(ROUNDS):
        fresh = {int(task.name) for task in (PROC / str(pid) / "task").iterdir()} - done
        for thread in fresh:
            pin_thread(cpus, thread)
        done |= fresh
        if not fresh:
            return


def pin_thread(cpus: Set[int], thread: int) -> None:
    """Let the thread with this native id run on `cpus` only; one that has just ended is no error. Raises OSError."""
    try:
        os.sched_setaffinity(thread, cpus)
    except ProcessLookupError:
        return


def process_affinities(pid: int) -> dict[int, tuple[str, frozenset[int]]]:
    """(name, CPUs) of each thread of a process by native id, as the kernel has them."""
    tasks = (PROC / str(pid) / "task").iterdir()
    return {int(task.name): found for task in tasks if (found := placement(task)) is not None}


def another_server_on(cpus: Set[int], proc: Path = PROC) -> bool:
    """Whether some Triton runs pinned to exactly these CPUs: two plans of the same machine are the same plan.

    Sees servers of this PID namespace. Those of other containers are told apart by what only the operator knows: give
    each container CPUs of its own, or a GPU of its own.
    """
    return any(placement(entry) == (PROGRAM, cpus) for entry in proc.glob("[0-9]*"))
