"""A model that costs next to nothing: the tokenizer of another one over two small layers without weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def write_tiny_model(source: Path, folder: Path) -> Path:
    """Make `folder` from the Llama-like model in `source`; needs `engine.random_weights`. Raises OSError."""
    folder.mkdir(parents=True)
    for name in COPIED:
        if (source / name).is_file():
            shutil.copy(source / name, folder / name)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | SMALL))
    return folder
