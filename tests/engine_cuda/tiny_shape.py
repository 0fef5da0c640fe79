"""The shape of the models that the tests of fused kernels make."""

from __future__ import annotations

from typing import Any

VOCAB = 97
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
