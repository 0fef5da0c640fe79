"""The context window as the model's files state it, for refusing over-long text before it is encoded.

An upper bound: the engine may have room for less, and the scheduler asks it.
"""

from __future__ import annotations

from pathlib import Path

from ...config import EngineConfig
from ...model_facts import read_folder


def most_prompt_tokens(model: Path, config: EngineConfig) -> int | None:
    """The longest prompt that leaves room for one token of answer; None when the files do not say."""
    stated = read_folder(model).context_tokens
    limits = [tokens for tokens in (stated, config.max_context_tokens) if tokens]
    return min(limits) - 1 if limits else None
