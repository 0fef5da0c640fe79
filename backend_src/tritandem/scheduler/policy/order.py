"""The definition of the order: every rule applied to every waiting request.

Plain on purpose: the scheduler runs `WaitingQueue`, which must pick the same request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .ageing import rank
from .deadline import urgency
from .fair_share import band
from .waiting import PolicyConfig, Waiting


def first(waiting: Sequence[Waiting], now_ns: int, policy: PolicyConfig, served_tokens: Mapping[str, int]) -> Waiting:
    """The next of `waiting` (not empty): lowest rank, then lowest band, earliest deadline, earliest arrival."""
    ranks = [rank(entry.priority, entry.arrived_ns, now_ns, policy.ageing_ns) for entry in waiting]
    lowest = min(ranks)
    level = [entry for entry, its_rank in zip(waiting, ranks, strict=True) if its_rank == lowest]
    if policy.fair_share:
        bands = [band(served_tokens[entry.tenant], policy.quantum_tokens) for entry in level]
        lowest_band = min(bands)
        level = [entry for entry, its_band in zip(level, bands, strict=True) if its_band == lowest_band]
    return min(
        level, key=lambda entry: (*urgency(entry.deadline_ns, entry.arrived_ns, entry.head_start_ns), entry.number)
    )
