"""What a GGUF file says about its tokenizer beyond the vocabulary: how digits are set apart, what ends an answer.

Owns what transformers' conversion of the vocabulary leaves out. Start-up only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

# Splitters that the GGUF names and that the conversion of the vocabulary alone does not restore.
DIGITS_THEN_BYTES = ("smollm", "starcoder", "refact", "command-r")


def read_header(gguf_file: Path) -> dict[str, Any]:
    """Scalars and strings of the file's header; the long lists (vocabulary, merges) are left out.

    Raises ValueError for a file that is no GGUF.
    """
    from gguf import GGUFReader

    fields = GGUFReader(gguf_file).fields
    return {name: field.contents() for name, field in fields.items() if len(field.data) == 1}


def restore_pre_tokenizer(tokenizer: Tokenizer, header: dict[str, Any]) -> None:
    """Give a converted tokenizer the splitter that the file names."""
    if header.get("tokenizer.ggml.pre") in DIGITS_THEN_BYTES:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )


def end_token_ids(header: dict[str, Any]) -> tuple[int, ...]:
    """Every token that ends an answer: end of sequence, of turn, of message. Empty when the file names none."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    return tuple(dict.fromkeys(int(header[key]) for key in keys if key in header))
