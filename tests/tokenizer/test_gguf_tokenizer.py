"""A GGUF file gives the ids of the model it was made from. TRITANDEM_TEST_GGUF names SmolLM2's own file to try, too."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from tritandem.config import TokenizerConfig
from tritandem.contracts.errors import ConfigError
from tritandem.tokenizer import TextTokenizer, load_tokenizer
from tritandem.tokenizer.encode.adversarial import short_texts

from tests.fuzz.claims import Subject, refute, subject

NORMAL, CONTROL = 1, 3
REAL = "TRITANDEM_TEST_GGUF"


def write_gguf(path: Path, folder: Path) -> None:
    """The header of a Llama without any weights, with the vocabulary of `folder`."""
    spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    special = {token["content"] for token in spec["added_tokens"] if token["special"]}
    tokens = sorted(spec["model"]["vocab"], key=spec["model"]["vocab"].__getitem__)
    writer = GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if token in special else NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, smollm2_folder: Path) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "written.gguf"
    write_gguf(path, smollm2_folder)
    return path


@pytest.fixture(scope="module")
def of_written(written: Path) -> Subject:
    """Read once: transformers takes seconds for a vocabulary in a GGUF file."""
    return subject(written)


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
@pytest.mark.parametrize("which", ["written", "real"])
def test_ids_are_those_of_the_folder_and_every_engine_is_exact(it: Subject, which: str, of_written: Subject) -> None:
    if which == "real" and REAL not in os.environ:
        pytest.skip(f"{REAL} does not name SmolLM2's GGUF file")
    of_file = subject(Path(os.environ[REAL])) if which == "real" else of_written
    rng = random.Random(13)
    assert of_file.fast is not None
    for text in ("  1 2", "a  12 b²", *short_texts(rng, 100, it.added)):
        assert np.array_equal(of_file.whole.encode(text, True), it.whole.encode(text, True)), repr(text)
        assert refute(of_file, text, rng) is None, repr(text)


def test_it_makes_a_tokenizer_like_a_folder_and_knows_every_end(of_written: Subject) -> None:
    tokenizer = TextTokenizer(of_written.source, TokenizerConfig(fast=False))  # proving it equal would take seconds
    assert tokenizer.end_ids == (2, 0)
    assert tokenizer.encode("plain").engine == "pieces"
    tokenizer.close()


def test_a_broken_file_is_a_config_error(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF but not really")
    with pytest.raises(ConfigError, match=r"broken\.gguf"):
        load_tokenizer(broken, TokenizerConfig())
