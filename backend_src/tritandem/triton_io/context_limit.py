"""The context window as the model's files state it, for refusing over-long text before it is encoded.

Pure but for reading one file. An upper bound: the engine may have room for less, and the scheduler asks it.
"""

from __future__ import annotations

import json
from pathlib import Path

from ..config import EngineConfig


def most_prompt_tokens(model: Path, config: EngineConfig) -> int | None:
    """The longest prompt that leaves room for one token of answer; None when the files do not say."""
    stated = _stated_context_tokens(model / "config.json")
    limits = [tokens for tokens in (stated, config.max_context_tokens) if tokens]
    return min(limits) - 1 if limits else None


def _stated_context_tokens(file: Path) -> int:
    """0: not stated. The text part of a model with several is what is served."""
    if not file.is_file():
        return 0
    values = json.loads(file.read_text(encoding="utf-8"))
    return int(values.get("text_config", values).get("max_position_embeddings") or 0)
