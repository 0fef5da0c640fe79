"""What the fused decoder cannot run is refused by name, so that transformers' own code runs it."""

from __future__ import annotations

import pytest
import torch
from transformers import Olmo3Config
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding
from tritandem.engine.model.fused import _rotary_tables
from tritandem.engine.model.linear.interface import Unfusable


def test_a_rotary_embedding_that_differs_by_layer_is_refused() -> None:
    module = Olmo3RotaryEmbedding(Olmo3Config(hidden_size=32, num_attention_heads=2))
    with pytest.raises(Unfusable, match="its rotary embedding differs by layer"):
        _rotary_tables(module, 16, 8, torch.zeros(1))
