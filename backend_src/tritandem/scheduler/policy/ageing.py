"""Priority classes that nothing can starve in: waiting lifts a request by one class per `ageing_ns`."""

from __future__ import annotations

from ...contracts.requests import PriorityClass


def rank(priority: PriorityClass, arrived_ns: int, now_ns: int, ageing_ns: int) -> int:
    """Lower goes first. Not bounded below: whatever has waited long enough overtakes every newcomer."""
    return int(priority) - max(0, now_ns - arrived_ns) // ageing_ns


def next_lift_ns(arrived_ns: int, now_ns: int, ageing_ns: int) -> int:
    """When the rank of a request changes next."""
    return arrived_ns + (max(0, now_ns - arrived_ns) // ageing_ns + 1) * ageing_ns
