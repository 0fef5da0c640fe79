"""Earliest deadline first within a rank, and no work for an answer that would come too late."""

from __future__ import annotations

NO_DEADLINE = 2**63 - 1


def urgency(deadline_ns: int | None, arrived_ns: int, head_start_ns: int) -> tuple[int, int]:
    """Sort key, lower first: the deadline; among equals (most have none) arrival less the head start."""
    return (NO_DEADLINE if deadline_ns is None else deadline_ns, arrived_ns - head_start_ns)


def too_late(deadline_ns: int | None, now_ns: int, least_service_ns: int) -> bool:
    """True when even the fastest possible answer (one step) would miss the deadline."""
    return deadline_ns is not None and now_ns + least_service_ns >= deadline_ns
