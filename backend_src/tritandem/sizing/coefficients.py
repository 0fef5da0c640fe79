"""What one unit of work costs in CPU time: read from a dated JSON file.

The file shipped beside this module is the default; another machine may have one of its own. Each value says where it
comes from, so that nobody takes a default for a measurement.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..contracts.errors import ConfigError

DEFAULT_FILE = "coefficients.json"


@dataclass(frozen=True, slots=True)
class Coefficients:
    """CPU seconds of one core. A fast rate of 0: the fast tokenizer engine is not installed."""

    tokenizer_fast_tokens_per_core_s: float
    tokenizer_slow_tokens_per_core_s: float
    scheduler_cpu_s_per_request: float
    scheduler_cpu_s_per_response: float
    triton_cpu_s_per_response: float  # the server and the stub's side of one decoupled response
    engine_host_s_per_step: float


MAY_BE_ZERO = frozenset({"tokenizer_fast_tokens_per_core_s", "scheduler_cpu_s_per_request"})
NAMES = tuple(field.name for field in fields(Coefficients))


@dataclass(frozen=True, slots=True)
class CoefficientsFile:
    """`sources` has one sentence a coefficient; `measured_on` is a date."""

    measured_on: str
    machine: str
    values: Coefficients
    sources: Mapping[str, str]


def load_coefficients(path: Path | None = None) -> CoefficientsFile:
    """Read a file; None reads the default. Raises ConfigError naming file and key."""
    name = str(path) if path else DEFAULT_FILE
    try:
        text = path.read_text() if path else files(__package__).joinpath("data").joinpath(DEFAULT_FILE).read_text()
        document = json.loads(text)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{name}: not valid JSON: {error}") from error
    return parse_coefficients(document, name)


def parse_coefficients(document: Any, name: str) -> CoefficientsFile:
    """Raises ConfigError naming the key that is missing, unknown or out of range."""
    if not isinstance(document, dict) or not isinstance(document.get("coefficients"), dict):
        raise ConfigError(f"{name}: coefficients: missing, expected an object")
    given = document["coefficients"]
    if unknown := sorted(set(given) - set(NAMES)):
        raise ConfigError(f"{name}: coefficients.{unknown[0]}: unknown key; known keys: {', '.join(NAMES)}")
    values: dict[str, float] = {}
    for key in NAMES:
        entry = given.get(key)
        value = entry.get("value") if isinstance(entry, dict) else None
        lowest_allowed = value == 0 and key in MAY_BE_ZERO
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (value > 0 or lowest_allowed):
            raise ConfigError(f"{name}: coefficients.{key}.value: given {value!r}, allowed: a number above 0")
        values[key] = float(value)
    sources = {key: str(given[key].get("source", "not told")) for key in NAMES}
    return CoefficientsFile(
        str(document.get("measured_on", "not told")),
        str(document.get("machine", "not told")),
        Coefficients(**values),
        sources,
    )
