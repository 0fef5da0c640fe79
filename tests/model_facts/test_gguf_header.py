"""A GGUF file's header is read whole, or what is wrong with it is said."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from tritandem.contracts.errors import ConfigError
from tritandem.model_facts.gguf_header import kind_name, read_floats, read_gguf


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_rope_freq_base(500000.0)
    writer.add_causal_attention(True)
    writer.add_head_count_kv([2, 2])
    writer.add_token_list(["a", "b", "grüße"])
    writer.add_chat_template("{{ messages }}")
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(2)
    writer.add_uint32("tokenizer.ggml.eom_token_id", 1)
    quantised = gguf.quants.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("weights_one", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("weights_two", np.arange(3, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_keys_and_tensors_are_those_that_gguf_reads(file: Path) -> None:
    header, theirs = read_gguf(file), gguf.GGUFReader(file)
    assert header.of_architecture() == {
        "block_count": 2,
        "rope.freq_base": 500000.0,
        "attention.causal": True,
        "attention.head_count_kv": [2, 2],
    }
    assert header.lengths["tokenizer.ggml.tokens"] == 3
    assert header.end_ids == (2, 1)
    assert header.values["tokenizer.chat_template"] == "{{ messages }}"
    assert [(each.name, each.offset) for each in header.tensors] == [
        (each.name, each.data_offset) for each in theirs.tensors
    ]
    assert [(each.shape, kind_name(each.kind)) for each in header.tensors] == [((4, 64), "Q8_0"), ((3,), "float32")]
    assert read_floats(header, "weights_two") == [0.0, 1.0, 2.0]


def test_every_way_of_being_cut_off_is_said(file: Path) -> None:
    content = file.read_bytes()
    for kept in range(1, len(content) - 31, 7):  # the last tensor's padding is nobody's
        file.write_bytes(content[:kept])
        with pytest.raises(ConfigError, match=r"some\.gguf: (not a|cut off)"):
            read_gguf(file)


def test_a_tensor_twice_is_named(file: Path) -> None:
    file.write_bytes(file.read_bytes().replace(b"weights_two", b"weights_one"))
    with pytest.raises(ConfigError, match="the tensor weights_one is listed twice"):
        read_gguf(file)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"PK\3\4 a zip", "not a GGUF file"),
        (b"GGUF\1\0\0\0" + bytes(16), "GGUF version 1, allowed: 2, 3"),
        (b"GGUF\0\0\0\3" + bytes(16), "GGUF version 50331648"),
        (b"GGUF\3\0\0\0" + bytes(16), "names no architecture"),
        (b"GGUF\3\0\0\0" + b"\xff" * 16, "ends inside its header"),
    ],
)
def test_what_is_no_such_file_is_said(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "some.gguf").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"some\.gguf: .*{reason}"):
        read_gguf(tmp_path / "some.gguf")
