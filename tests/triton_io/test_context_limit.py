"""The limit by which over-long prompts are refused early: from the model's files, the lower one where two say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tritandem.config import EngineConfig
from tritandem.triton_io.plugs.context_limit import most_prompt_tokens


@pytest.mark.parametrize(
    ("values", "configured", "expected"),
    [
        ({"max_position_embeddings": 100}, 0, 99),
        ({"max_position_embeddings": 100}, 40, 39),
        ({"max_position_embeddings": 100}, 400, 99),
        ({"text_config": {"max_position_embeddings": 50}, "max_position_embeddings": 9}, 0, 49),
        ({}, 0, None),
        (None, 40, 39),
        (None, 0, None),
    ],
)
def test_the_lower_limit_wins_less_one_token_of_answer(
    tmp_path: Path, values: Any, configured: int, expected: int | None
) -> None:
    if values is not None:
        (tmp_path / "config.json").write_text(json.dumps(values))
    assert most_prompt_tokens(tmp_path, EngineConfig(max_context_tokens=configured)) == expected


def test_a_single_file_model_states_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF")
    assert most_prompt_tokens(model, EngineConfig()) is None
