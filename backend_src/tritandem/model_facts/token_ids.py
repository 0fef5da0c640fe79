"""Whether a folder's files agree on tokens: a model that would refuse every request, or read another model's
vocabulary, is refused before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..contracts.errors import ConfigError
from .folder import TOKENIZER_CONFIG, ModelFolder, read_json

TOKENIZER = "tokenizer.json"
ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TOKEN_FIELDS = ("bos_token", "eos_token")  # nothing is padded: a padding token may be new
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")  # how families end what a speaker says
_MESSAGE_ENDS = {"<|end|>": "<|return|>"}  # with the second in the vocabulary, the first ends a part of an answer only
NO_PADDING = -1  # how older configurations say that there is no such token


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The entries of a tokenizer by their text."""

    ids: dict[str, int]
    special: frozenset[str]  # added tokens that no ordinary text becomes

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.ids.values(), default=-1) + 1


def turn_end_ids(vocabulary: Vocabulary) -> tuple[int, ...]:
    """Tokens that end a turn by their text: many a configuration names only the end of a document."""
    ids = vocabulary.ids
    return tuple(ids[text] for text in TURN_ENDS if text in ids and _MESSAGE_ENDS.get(text) not in ids)


def read_vocabulary(folder: Path) -> Vocabulary | None:
    """Of tokenizer.json; None when there is none. Raises ConfigError."""
    spec = read_json(folder / TOKENIZER)
    return vocabulary_of(spec) if isinstance(spec.get("model"), dict) else None


def vocabulary_of(spec: Mapping[str, Any]) -> Vocabulary:
    """Of a tokenizer.json that was parsed. Raises ConfigError."""
    try:
        entries = spec["model"]["vocab"]
        listed = entries.items() if isinstance(entries, dict) else ((entry[0], at) for at, entry in enumerate(entries))
        ids = dict(listed)
        added = spec.get("added_tokens") or []
        ids |= {token["content"]: token["id"] for token in added}
        return Vocabulary(ids, frozenset(token["content"] for token in added if token["special"]))
    except (KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"{TOKENIZER}: not a tokenizer: {type(error).__name__}: {error}") from error


def check_token_ids(folder: ModelFolder) -> None:
    """Beginning, end and padding are ids of the vocabulary wherever they stand. Raises ConfigError."""
    for file, values in folder.parts():
        for name in ID_FIELDS:
            given = values.get(name)
            listed = given if name == "eos_token_id" and isinstance(given, list) else [given]
            for token in [] if given is None else listed:
                if name == "pad_token_id" and token == NO_PADDING:
                    continue
                _check_id(folder, f"{folder.path / file}: {name}", token)


def _check_id(folder: ModelFolder, where: str, token: object) -> None:
    size = folder.vocab_size
    whole = isinstance(token, int) and not isinstance(token, bool)
    if not whole or not 0 <= token < (size or 1 << 31):  # type: ignore[operator]
        allowed = "an id of the vocabulary" + (f", 0..{size - 1} (vocab_size)" if size else "")
        raise ConfigError(f"{where}: given {token!r}, allowed: {allowed}")


def check_vocabulary(folder: ModelFolder, vocabulary: Vocabulary) -> None:
    """Every token that a text may become has a row in the model's embedding; more rows than tokens are padding.

    A special token without a row is allowed as long as nothing writes it: many tokenizers carry some for padding or
    for pictures. Raises ConfigError.
    """
    decoder = folder.tokenizer_config.get("added_tokens_decoder") or {}
    known = vocabulary.ids.keys() | {token["content"] for token in decoder.values()}
    for name in TOKEN_FIELDS:
        given = folder.tokenizer_config.get(name)
        text = given.get("content") if isinstance(given, dict) else given
        if text is not None and text not in known:
            where = f"{folder.path / TOKENIZER_CONFIG}: {name}"
            raise ConfigError(f"{where}: given {text!r}, allowed: a token of {TOKENIZER}, which has none of this name")
    rows = folder.vocab_size
    if rows is None or vocabulary.size <= rows:
        return
    templates = "\n".join(folder.chat_templates)
    beyond = [
        text
        for text, token in vocabulary.ids.items()
        if token >= rows and (text not in vocabulary.special or (text and text in templates))
    ]
    if beyond:
        first = min(beyond, key=vocabulary.ids.__getitem__)
        raise ConfigError(
            f"{folder.path}: {len(beyond)} tokens of the tokenizer have no row in the model's embedding, which has "
            f"{rows} (vocab_size): {first!r} is {vocabulary.ids[first]}; tokenizer and model do not belong together"
        )


def tokens_without_row(folder: ModelFolder, vocabulary: Vocabulary) -> list[str]:
    """Special tokens that no request may hold."""
    rows = folder.vocab_size
    return [] if rows is None else [text for text, token in vocabulary.ids.items() if token >= rows]
