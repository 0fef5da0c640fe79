"""Reads a model's tokenizer files: a Hugging Face folder or a GGUF file.

Owns the loading through `transformers`, so that every component is the one transformers would use. Knows nothing
about encoding. The returned `tokenizers.Tokenizer` is a private copy: transformers' own calls change the truncation
and padding of theirs, which is not safe while another thread encodes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...contracts.errors import ConfigError
from ...model_facts.folder import read_folder
from ...model_facts.gguf_header import read_gguf
from ...model_facts.token_ids import check_token_ids, check_vocabulary, turn_end_ids, vocabulary_of
from .gguf_vocabulary import restore_tokenizer


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One entry of the added vocabulary."""

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool
    single_word: bool
    normalized: bool

    @property
    def flag_free(self) -> bool:
        """Matched as plain text: what stands beside it does not change the match."""
        return not (self.lstrip or self.rstrip or self.single_word or self.normalized)


@dataclass(frozen=True, slots=True)
class TokenizerSource:
    """Everything that was read. `renderer` is the transformers tokenizer; it renders chats and never encodes."""

    json_text: str
    spec: dict[str, Any]  # json_text, parsed
    renderer: Any
    end_ids: tuple[int, ...]
    clean_up_spaces: bool
    spellings: dict[int, str]  # the vocabulary by id, the added tokens among them
    vocab_size: int  # one more than the largest id

    def new_tokenizer(self) -> Tokenizer:
        """A fresh `tokenizers.Tokenizer` without truncation and padding, shared with nobody."""
        return Tokenizer.from_str(self.json_text)

    @property
    def added_tokens(self) -> tuple[AddedToken, ...]:
        names = AddedToken.__dataclass_fields__
        return tuple(AddedToken(**{name: entry[name] for name in names}) for entry in self.spec["added_tokens"])


def spellings_of(spec: dict[str, Any]) -> dict[int, str]:
    """The vocabulary's entries by id, the added tokens among them."""
    vocab = spec["model"]["vocab"]
    entries = vocab.items() if isinstance(vocab, dict) else ((entry[0], at) for at, entry in enumerate(vocab))
    by_id = {token: spelling for spelling, token in entries}
    return by_id | {entry["id"]: entry["content"] for entry in spec["added_tokens"]}


def tokenizer_from_spec(spec: dict[str, Any]) -> Tokenizer:
    """A `tokenizers.Tokenizer` from a changed copy of TokenizerSource.spec."""
    return Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))


def read_source(path: Path) -> TokenizerSource:
    """Load from a folder (tokenizer.json and companions) or a `.gguf` file. Raises ConfigError."""
    from transformers import AutoTokenizer  # imports torch: seconds, and only needed at start-up

    if not path.exists():
        raise ConfigError(f"{path}: does not exist; give a Hugging Face folder or a .gguf file")
    header = read_gguf(path) if path.is_file() else None
    try:
        if header is not None:
            renderer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name, local_files_only=True)
            restore_tokenizer(renderer, header.values)
        else:
            renderer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # transformers raises whatever its many loaders raise
        if (path / "tokenizer.model").is_file() and not (path / "tokenizer.json").is_file():
            raise ConfigError(
                f"{path}: given tokenizer.model alone, allowed: tokenizer.json; put that of the same model beside it, "
                "as its publisher or another copy on the hub has it"
            ) from error
        raise ConfigError(f"{path}: no tokenizer could be loaded: {type(error).__name__}: {error}") from error
    backend = getattr(renderer, "_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError(f"{path}: {type(renderer).__name__} has no tokenizer.json form, which is required")
    json_text = backend.to_str()
    spec = json.loads(json_text)
    if spec["truncation"] or spec["padding"]:
        spec["truncation"] = spec["padding"] = None
        json_text = json.dumps(spec, ensure_ascii=False)
    spellings = spellings_of(spec)
    folder = read_folder(path)
    check_token_ids(folder)
    vocabulary = vocabulary_of(spec)
    check_vocabulary(folder, vocabulary)
    stated = (header.end_ids if header is not None else ()) or folder.end_ids(renderer.eos_token_id)
    return TokenizerSource(
        json_text=json_text,
        spec=spec,
        renderer=renderer,
        end_ids=tuple(dict.fromkeys((*stated, *turn_end_ids(vocabulary)))),
        clean_up_spaces=_cleans_up_spaces(renderer, spec),
        spellings=spellings,
        vocab_size=max(spellings, default=-1) + 1,
    )


def _cleans_up_spaces(renderer: Any, spec: dict[str, Any]) -> bool:
    """Whether transformers' `decode` removes spaces before punctuation. It never does so for BPE, unless forced."""
    forced = bool(getattr(renderer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False))
    return bool(renderer.clean_up_tokenization_spaces) and (spec["model"]["type"] != "BPE" or forced)
