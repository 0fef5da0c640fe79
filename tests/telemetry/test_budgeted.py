"""Claims about how often a costly measurement is made."""

from __future__ import annotations

import pytest
from tritandem.telemetry.budgeted import Budgeted


class Costly:
    """Takes `cost_s` of CPU each time; the clock moves on by itself between calls."""

    def __init__(self, cost_s: float) -> None:
        self.cost_s, self.now_s, self.cpu_s, self.runs = cost_s, 100.0, 0.0, 0

    def __call__(self) -> None:
        self.runs += 1
        self.cpu_s += self.cost_s


@pytest.mark.parametrize(("cost_s", "runs"), [(0.0, 100), (0.001, 100), (0.01, 20), (0.1, 2)])
def test_a_report_takes_its_share_of_a_core_at_most(cost_s: float, runs: int) -> None:
    costly = Costly(cost_s)
    budgeted = Budgeted(costly, 0.001, clock=lambda: costly.now_s, cpu_clock=lambda: costly.cpu_s)
    for _ in range(100):  # 200 s
        budgeted()
        costly.now_s += 2.0
    assert costly.runs == runs
    assert costly.cpu_s <= 0.001 * 200 + cost_s


def test_a_report_that_fails_costs_all_the_same() -> None:
    costly = Costly(0.1)

    def broken() -> None:
        costly()
        raise OSError("gone")

    budgeted = Budgeted(broken, 0.001, clock=lambda: costly.now_s, cpu_clock=lambda: costly.cpu_s)
    with pytest.raises(OSError, match="gone"):
        budgeted()
    budgeted()
    assert costly.runs == 1
