"""Weights are counted by name from the headers of their files, and files that are not whole are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tritandem.contracts.errors import ConfigError
from tritandem.model_facts.weight_files import read_weights

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"


def _save(file: Path, *names: str) -> None:
    save_file({name: np.zeros((2, 3), np.float16) for name in names}, file)


def _sharded(folder: Path, **placed: str) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))


def test_one_file(tmp_path: Path) -> None:
    _save(tmp_path / ONE, "a", "b")
    weights = read_weights(tmp_path)
    assert weights is not None
    assert sorted(weights) == ["a", "b"]
    assert (weights["a"].shape, weights["a"].kind, weights["a"].stored_bytes) == ((2, 3), "F16", 12)


def test_several_files(tmp_path: Path) -> None:
    _save(tmp_path / "1.safetensors", "a")
    _save(tmp_path / "2.safetensors", "b", "c")
    _sharded(tmp_path, a="1.safetensors", b="2.safetensors", c="2.safetensors")
    assert sorted(read_weights(tmp_path) or ()) == ["a", "b", "c"]


def test_another_format_is_left_to_its_loader(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert read_weights(tmp_path) is None


def test_a_file_of_the_index_that_is_not_there_is_named(tmp_path: Path) -> None:
    _save(tmp_path / "1.safetensors", "a")
    _sharded(tmp_path, a="1.safetensors", b="2.safetensors")
    with pytest.raises(ConfigError, match=r"index\.json: 1 of 2 files are not there: 2\.safetensors"):
        read_weights(tmp_path)


def test_a_weight_that_is_not_where_the_index_says_is_named(tmp_path: Path) -> None:
    _save(tmp_path / "1.safetensors", "a")
    _sharded(tmp_path, a="1.safetensors", b="1.safetensors")
    with pytest.raises(ConfigError, match=r"the weight b is not in 1\.safetensors"):
        read_weights(tmp_path)


def test_a_weight_in_two_files_is_named(tmp_path: Path) -> None:
    _save(tmp_path / "1.safetensors", "a")
    _save(tmp_path / "2.safetensors", "a", "b")
    _sharded(tmp_path, a="1.safetensors", b="2.safetensors")
    with pytest.raises(ConfigError, match=r"the weight a is in 1\.safetensors and also in 2\.safetensors"):
        read_weights(tmp_path)


def test_a_weight_twice_in_one_file_is_named(tmp_path: Path) -> None:
    entry = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    header = f'{{"a":{entry},"a":{entry}}}'.encode()
    (tmp_path / ONE).write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(ConfigError, match="a is listed twice"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    ("kept", "reason"),
    [(4, "ends inside its header"), (30, "ends inside its header"), (-1, r"cut off: .* ends? at byte")],
)
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, kept: int, reason: str) -> None:
    _save(tmp_path / ONE, "a")
    content = (tmp_path / ONE).read_bytes()
    (tmp_path / ONE).write_bytes(content[:kept])
    with pytest.raises(ConfigError, match=rf"model\.safetensors: .*{reason}"):
        read_weights(tmp_path)
