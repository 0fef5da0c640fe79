"""The engine never computes with more threads than its process may use."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tritandem.engine.cpu_threads import limit_threads, usable_cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 64), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 64), ("?", 64)],
)
def test_a_container_quota_bounds_the_cores(tmp_path: Path, quota: str, cores: int) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(quota)
    assert usable_cores(64, file) == cores
    assert usable_cores(1, file) == 1


def test_without_a_quota_file_affinity_decides(tmp_path: Path) -> None:
    assert usable_cores(7, tmp_path / "missing") == 7


def test_a_configured_number_is_taken_as_it_is() -> None:
    before = torch.get_num_threads()
    try:
        assert limit_threads(1) == torch.get_num_threads() == 1
        assert limit_threads(0) >= 1
    finally:
        torch.set_num_threads(before)
