"""GGUF file -> Hugging Face folder: config, weights, tokenizer, chat template, end tokens.

Weights are stored as float32, which holds every unpacked value of a quantised file as it is (a 4-bit weight times a
float16 scale plus a float16 minimum needs more digits than bfloat16 has). Run as `python -m tritandem.models.gguf`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from ..contracts.errors import ConfigError
from ..model_facts.generation import gguf_sampling
from ..model_facts.gguf_header import GgufHeader, read_gguf
from ..tokenizer.files.gguf_vocabulary import restore_tokenizer


def convert(gguf_file: Path, out: Path) -> None:
    """Write the folder `out` (exists, empty). Raises ConfigError for a file that is not a whole model, and whatever
    the libraries raise for a vocabulary they do not know."""
    header = read_gguf(gguf_file)
    # Seconds to import: a file that is none has been refused by now.
    from ..engine.model.gguf.config import gguf_config
    from ..engine.model.gguf.model import load_gguf

    model = load_gguf(header, gguf_config(header))
    tied = model.config.tie_word_embeddings
    weights = {
        key: tensor.contiguous() for key, tensor in model.state_dict().items() if not (tied and key == "lm_head.weight")
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # the library leaves it to its owner alone

    save_tokenizer(header, out, model.config.max_position_embeddings)
    end_ids = end_token_ids(header.end_ids)
    config = model.config.to_dict()
    config.pop("_name_or_path", None)
    config.update(architectures=[type(model).__name__], dtype="float32", eos_token_id=end_ids)
    write_json(out / "config.json", config)
    token_ids = {"bos_token_id": config.get("bos_token_id"), "pad_token_id": config.get("pad_token_id")}
    write_json(out / "generation_config.json", {**token_ids, "eos_token_id": end_ids, **gguf_sampling(header.values)})


def save_tokenizer(header: GgufHeader, out: Path, max_tokens: int | None = None) -> None:
    """Write the file's tokenizer into the folder `out`. Raises ValueError for a vocabulary that is not known."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(header.path.parent, gguf_file=header.path.name)
    restore_tokenizer(tokenizer, header.values)
    if max_tokens is not None:
        tokenizer.model_max_length = max_tokens
    tokenizer.save_pretrained(out)
    # A class of its own would build another tokenizer from the vocabulary; tokenizer.json says all.
    config = json.loads((out / "tokenizer_config.json").read_text(encoding="utf-8"))
    write_json(out / "tokenizer_config.json", {**config, "tokenizer_class": "PreTrainedTokenizerFast"})


def end_token_ids(ids: Sequence[int]) -> int | list[int]:
    """As a configuration has them: a bare number when there is one. Raises ValueError when there is none."""
    if not ids:
        raise ValueError("the GGUF file names no end token (tokenizer.ggml.eos_token_id)")
    return ids[0] if len(ids) == 1 else list(ids)


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except ConfigError as error:
        sys.exit(str(error))
