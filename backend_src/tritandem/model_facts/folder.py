"""The JSON files of a Hugging Face folder, and what they say of context, vocabulary and end tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..contracts.errors import ConfigError

CONFIG, GENERATION, TOKENIZER_CONFIG = "config.json", "generation_config.json", "tokenizer_config.json"
# Rotary embeddings that would follow the longest position of a batch are held at the length of training.
_HELD_ROPE_TYPES = ("dynamic", "longrope", "su")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """What was read; a file that is not there is empty."""

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]
    tokenizer_config: dict[str, Any]

    @property
    def text(self) -> dict[str, Any]:
        """The part of the configuration that describes the language model, where a model has several parts."""
        part = self.config.get("text_config")
        return part if isinstance(part, dict) else self.config

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embedding: ids that the model knows. None: a default of its class."""
        size = self.text.get("vocab_size", self.config.get("vocab_size"))
        return size if isinstance(size, int) else None

    @property
    def context_tokens(self) -> int | None:
        return context_tokens(self.text)

    @property
    def chat_templates(self) -> list[str]:
        """The text of every template that the folder has."""
        given = self.tokenizer_config.get("chat_template")
        entries = given if isinstance(given, list) else [given]
        texts = [entry.get("template") if isinstance(entry, dict) else entry for entry in entries]
        texts += [_text(file) for file in sorted(self.path.glob("*.jinja"))]
        texts.append(read_json(self.path / "chat_template.json").get("chat_template"))
        return [text for text in texts if isinstance(text, str)]

    def end_ids(self, eos_of_tokenizer: int | None) -> tuple[int, ...]:
        """Every id that ends an answer.

        The generation configuration is what transformers' `generate` goes by; where it says nothing the model's does.
        The tokenizer's own end token counts beside them: chat templates end their turns with it.
        """
        stated: Any = None
        for source in (self.generation, self.text, self.config):
            if (stated := source.get("eos_token_id")) is not None:
                break
        ids = stated if isinstance(stated, list) else [] if stated is None else [stated]
        return tuple(dict.fromkeys([*ids, *([] if eos_of_tokenizer is None else [eos_of_tokenizer])]))

    def parts(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """(file, what it says) wherever token ids may stand."""
        yield CONFIG, self.config
        if self.text is not self.config:
            yield f"{CONFIG}, text_config", self.text
        yield GENERATION, self.generation
        yield TOKENIZER_CONFIG, self.tokenizer_config


def read_folder(path: Path) -> ModelFolder:
    """Raises ConfigError for a file that is no JSON object."""
    return ModelFolder(path, *(read_json(path / name) for name in (CONFIG, GENERATION, TOKENIZER_CONFIG)))


def read_json(file: Path) -> dict[str, Any]:
    """{} when it is not there. Raises ConfigError."""
    if not file.is_file():
        return {}
    try:
        values = json.loads(_text(file))
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{file}: given {type(values).__name__}, allowed: a JSON object")
    return values


def context_tokens(text: Mapping[str, Any]) -> int | None:
    """Of a language model's configuration; None when it does not say."""
    limit = text.get("max_position_embeddings")
    if not limit:
        return None
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type")) in _HELD_ROPE_TYPES:
        original = rope.get("original_max_position_embeddings") or text.get("original_max_position_embeddings")
        limit = min(limit, original or limit)
    return int(limit)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
