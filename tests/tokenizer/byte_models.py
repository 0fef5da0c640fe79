"""Folders of models whose vocabulary is the 256 bytes: one id a byte, and whatever tokens a chat template needs."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tritandem.config import TokenizerConfig
from tritandem.tokenizer import TextTokenizer, load_tokenizer
from tritandem.tokenizer.decode.token_text import byte_alphabet

BOS, EOS = ("<s>", "<bos>", "<|begin_of_text|>"), ("</s>", "<|im_end|>")
ROLES = dict.fromkeys(BOS, "bos_token") | dict.fromkeys(EOS, "eos_token")
SLOW = TokenizerConfig(fast=False, prefix_cache=False)


def write_folder(
    folder: Path, template: str | dict[str, str] | None, special: Iterable[str] = (), plain: Iterable[str] = ()
) -> Path:
    """`special` tokens are never shown when ids are decoded, `plain` ones (as `<think>`) are."""
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    names = [*((name, True) for name in special), *((name, False) for name in plain)]
    spec: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": len(vocab) + at, "content": name, **flags, "special": is_special}
            for at, (name, is_special) in enumerate(names)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    }
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    if isinstance(template, dict):
        config["chat_template"] = [{"name": name, "template": text} for name, text in template.items()]
    config |= {ROLES[name]: name for name in special if name in ROLES}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def load(
    folder: Path, template: str | dict[str, str], special: Iterable[str] = (), plain: Iterable[str] = ()
) -> TextTokenizer:
    """The tokenizer of such a folder, as a server would load it."""
    return load_tokenizer(write_folder(folder, template, special, plain), SLOW)
