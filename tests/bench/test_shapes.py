"""The shapes of the benchmarks are configurations that the engine takes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritandem.engine.model.loader import check_model
from tritandem_bench.shapes import SHAPES, write_shape


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_a_model_that_is_served(tmp_path: Path, name: str) -> None:
    check_model(write_shape(name, tmp_path))


def test_an_unknown_shape_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'huge' is not known: llama"):
        write_shape("huge", tmp_path)
