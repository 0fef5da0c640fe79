"""Makes the strict fake of Triton's module importable; nothing it was told survives a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fakes"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import triton_python_backend_utils as pb_utils


@pytest.fixture(autouse=True)
def _clean_fake() -> Iterator[None]:
    pb_utils.Logger.lines.clear()
    pb_utils.InferenceRequest.models.clear()
    pb_utils.InferenceRequest.decoupled.clear()
    pb_utils.MetricFamily.values.clear()
    yield
    unexpected = [text for level, text in pb_utils.Logger.lines if level == "error"]
    assert not unexpected, unexpected
