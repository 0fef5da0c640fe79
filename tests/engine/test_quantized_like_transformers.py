"""Quantized checkpoints give the logits that transformers' own loading of the same files gives, unpacked on a CPU.

transformers reads GPTQ and AWQ on GPUs alone, and compressed-tensors with the package of that name, which the project
does not need: those tests are skipped without it. It rounds unpacked weights to the type of their scales, 16 bits here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, LlamaConfig, PreTrainedModel
from tritandem.config import EngineConfig
from tritandem.engine.model.loader import load_model

from tests.engine import quantized_folders as made
from tests.engine.test_quantized_checkpoints import distance, logits

BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


def in_whole_blocks() -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=128, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def both(folder: Path, **theirs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    ours = load_model(folder, EngineConfig(device="cpu"), lambda note: None).model
    return logits(ours), logits(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **theirs))


def test_fp8_in_blocks(tmp_path: Path) -> None:
    made.write(tmp_path, in_whole_blocks(), BLOCKS, made.fp8_block(128, 128))
    assert distance(*both(tmp_path)) < 1e-6


@pytest.mark.filterwarnings("ignore")  # of that package and its loader
@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        ("compressed-tensors FP8 static", 1e-6),  # its scale has 32 bits
        ("compressed-tensors FP8 dynamic", 0.04),  # bfloat16
        ("compressed-tensors INT4 g32", 0.005),  # float16
        ("compressed-tensors INT4 a row", 0.005),
        ("compressed-tensors INT4 zero points", 0.005),
    ],
)
def test_compressed_tensors(kind: str, limit: float, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    stated, store = made.FORMATS[kind]
    made.write(tmp_path, in_whole_blocks(), {**stated, "quantization_status": "compressed"}, store)
    assert distance(*both(tmp_path, quantization_config=CompressedTensorsConfig(run_compressed=False))) < limit
