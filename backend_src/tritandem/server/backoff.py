"""When to start a server again that ended by itself: a pure function of how often and how long it ran."""

from __future__ import annotations

from dataclasses import dataclass

MOST_DOUBLINGS = 32


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    max_restarts: int | None = None  # in a row; None: no limit, 0: never restart
    first_delay_s: float = 1.0
    max_delay_s: float = 30.0
    stable_after_s: float = 60.0  # a run of this length starts the count anew


def restarts_in_a_row(policy: RestartPolicy, so_far: int, ran_s: float) -> int:
    """The number of failed runs in a row after one more that was ready for `ran_s` seconds."""
    return 1 if ran_s >= policy.stable_after_s else so_far + 1


def delay_s(policy: RestartPolicy, failures: int) -> float | None:
    """Seconds to wait before the next start after `failures` >= 1 failed runs in a row; None: give up."""
    if policy.max_restarts is not None and failures > policy.max_restarts:
        return None
    doublings = min(failures - 1, MOST_DOUBLINGS)
    return min(policy.max_delay_s, policy.first_delay_s * 2.0**doublings)
