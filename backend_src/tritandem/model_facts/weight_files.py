"""The weights of a Hugging Face folder by name, from the headers of its safetensors files: nothing is loaded."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..contracts.errors import ConfigError
from .folder import read_json

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
MOST_HEADER_BYTES = 100 << 20  # the format's own limit
_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Weight:
    """`kind`: the format's name of the type, such as F32 or BF16."""

    shape: tuple[int, ...]
    kind: str
    stored_bytes: int

    @property
    def elements(self) -> int:
        return prod(self.shape)


def read_weights(folder: Path) -> dict[str, Weight] | None:
    """The weights in the files that would be loaded; None for other formats.

    Raises ConfigError: a file of the index is not there or does not hold what the index says, a file is cut off, a
    weight stands there twice.
    """
    if (folder / ONE_FILE).is_file():
        return read_header(folder / ONE_FILE)
    files, placed = weight_files(folder), read_json(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict):
        return None
    if absent := [file for file in files if not (folder / file).is_file()]:
        raise ConfigError(f"{folder / INDEX}: {len(absent)} of {len(files)} files are not there: {absent[0]}")
    weights: dict[str, Weight] = {}
    held_by: dict[str, str] = {}
    for file in files:
        for name, weight in read_header(folder / file).items():
            if name in weights:
                raise ConfigError(f"{folder}: the weight {name} is in {held_by[name]} and also in {file}")
            weights[name], held_by[name] = weight, file
    for name, file in placed.items():
        if held_by.get(name) != file:
            raise ConfigError(f"{folder / INDEX}: the weight {name} is not in {file}")
    return weights


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that would be loaded. Raises ConfigError."""
    if (folder / ONE_FILE).is_file():
        return [ONE_FILE]
    placed = read_json(folder / INDEX).get("weight_map")
    return sorted(set(placed.values())) if isinstance(placed, dict) else []


def read_header(file: Path) -> dict[str, Weight]:
    """Of one safetensors file. Raises ConfigError."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(size - _LENGTH_BYTES, MOST_HEADER_BYTES):
            raise ConfigError(f"{file}: not a whole safetensors file, it ends inside its header")
        try:
            entries = json.loads(opened.read(length), object_pairs_hook=_without_doubles)
            entries.pop("__metadata__", None)
            weights = {name: _weight(entry) for name, entry in entries.items()}
            end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{file}: not a safetensors file: {error}") from error
    if (end := _LENGTH_BYTES + length + end) > size:
        raise ConfigError(f"{file}: cut off: its weights end at byte {end}, the file at {size}")
    return weights


def _weight(entry: dict[str, Any]) -> Weight:
    begin, end = entry["data_offsets"]
    return Weight(tuple(entry["shape"]), entry["dtype"], end - begin)


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]} is listed twice")
    return dict(pairs)
