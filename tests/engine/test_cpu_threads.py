"""The engine never computes with more threads than its process may use."""

from __future__ import annotations

import os

import torch
from tritandem.engine.runners.cpu_threads import limit_threads


def test_a_configured_number_is_taken_as_it_is_and_none_means_what_is_left() -> None:
    before = torch.get_num_threads()
    try:
        assert limit_threads(1) == torch.get_num_threads() == 1
        assert [limit_threads(8, ranks) for ranks in (2, 3, 16)] == [4, 2, 1]
        assert 1 <= limit_threads(0) <= max(1, len(os.sched_getaffinity(0)) - 1)
    finally:
        torch.set_num_threads(before)
