"""What a model's authors recommend: read from both kinds of files, in the words of requests, checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tritandem.contracts.errors import ConfigError
from tritandem.model_facts.generation import gguf_sampling, sampling_defaults


@pytest.mark.parametrize(
    ("stated", "meant"),
    [
        ({}, {}),
        ({"eos_token_id": 2, "max_new_tokens": 9, "max_length": 20}, {}),
        (
            {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1},
            {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1},
        ),
        ({"do_sample": True, "top_p": 0.9}, {"temperature": 1.0, "top_p": 0.9}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"temperature": 0.6, "top_k": None}, {"temperature": 0.6}),
    ],
    ids=str,
)
def test_a_folder_says_how_to_sample(stated: dict[str, Any], meant: dict[str, float], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(stated))
    assert sampling_defaults(tmp_path) == meant


def test_no_file_says_nothing(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == sampling_defaults(None) == {}


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 1.5}, {"top_k": -3}, {"min_p": True}], ids=str)
def test_what_cannot_be_meant_is_named(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(wrong))
    [name] = wrong
    with pytest.raises(ConfigError, match=rf"generation_config\.json: {name}: given .*, allowed: "):
        sampling_defaults(tmp_path)


def test_a_gguf_file_says_it_in_its_own_names(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_float32("general.sampling.penalty_repeat", 1.25)
    writer.add_int32("general.sampling.top_k", 40)
    writer.add_int32("general.sampling.penalty_last_n", 64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert sampling_defaults(file) == {"temperature": 0.5, "repetition_penalty": 1.25, "top_k": 40}
    assert gguf_sampling({"general.name": "x"}) == {}
