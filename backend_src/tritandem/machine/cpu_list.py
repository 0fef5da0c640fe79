"""The kernel's notation for sets of CPUs: `0-3,8,10-11`."""

from __future__ import annotations

from collections.abc import Iterable

MAX_CPU = 8191  # more than any kernel is built for


def parse_cpus(text: str) -> frozenset[int]:
    """The CPUs that `text` names; an empty text names none. Raises ValueError."""
    cpus: set[int] = set()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        first, dash, last = part.partition("-")
        low, high = int(first), int(last if dash else first)
        if not 0 <= low <= high <= MAX_CPU:
            raise ValueError(f"{part} is no range of CPUs in 0..{MAX_CPU}")
        cpus.update(range(low, high + 1))
    return frozenset(cpus)


def format_cpus(cpus: Iterable[int]) -> str:
    """The shortest text that `parse_cpus` reads as `cpus`."""
    runs: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if runs and cpu == runs[-1][1] + 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
