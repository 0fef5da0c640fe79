"""Makes the strict fake of Triton's module importable; nothing it was told survives a test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.fakes import triton_python_backend_utils as pb_utils

sys.modules["triton_python_backend_utils"] = pb_utils  # what the server's own interpreter has


@pytest.fixture(autouse=True)
def _clean_fake() -> Iterator[None]:
    pb_utils.Logger.lines.clear()
    pb_utils.InferenceRequest.models.clear()
    pb_utils.InferenceRequest.decoupled.clear()
    pb_utils.MetricFamily.values.clear()
    yield
    unexpected = [text for level, text in pb_utils.Logger.lines if level == "error"]
    assert not unexpected, unexpected
