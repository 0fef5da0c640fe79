"""What a model's authors recommend for sampling: generation_config.json of a folder, `general.sampling` of a GGUF file.

The one reader of these values. Whether they apply to requests is a setting; knows nothing about requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..contracts.errors import ConfigError, InvalidRequest
from ..contracts.fields import FIELDS, SamplingParams
from .folder import GENERATION, read_folder
from .gguf_header import read_gguf

# What a request may say and such a file says too; lengths are no matter of taste, and stay the server's.
NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
IN_GGUF = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
_PREFIX = "general.sampling."


def sampling_defaults(model: Path | None) -> dict[str, float]:
    """By the names of `contracts/fields.py`; {} where the files say nothing. Raises ConfigError naming file and field.

    `do_sample` false means greedy whatever stands beside it, as for transformers' `generate`; true without a
    temperature means 1.
    """
    if model is None:
        return {}
    if model.is_dir():
        return _checked(model / GENERATION, read_folder(model).generation)
    return _checked(model, gguf_sampling(read_gguf(model).values))


def gguf_sampling(values: Mapping[str, Any]) -> dict[str, Any]:
    """A GGUF file's, by the names of generation_config.json."""
    stated = {key[len(_PREFIX) :]: value for key, value in values.items() if key.startswith(_PREFIX)}
    named = {IN_GGUF.get(name, name): value for name, value in stated.items()}
    return {name: value for name, value in named.items() if name in NAMES}


def _checked(file: Path, stated: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {name: stated[name] for name in NAMES if stated.get(name) is not None}
    draws = stated.get("do_sample")
    if draws is False:
        found["temperature"] = 0.0
    elif draws:
        found.setdefault("temperature", 1.0)
    for name, value in found.items():
        alone: dict[str, Any] = {name: value}
        try:
            SamplingParams(**alone)
        except InvalidRequest:
            raise ConfigError(f"{file}: {name}: given {value!r}, allowed: {FIELDS[name].allowed}") from None
    return found
