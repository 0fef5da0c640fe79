"""What a front needs of a model's files: its chat templates and its context, of a Hugging Face folder or GGUF file."""

from __future__ import annotations

from pathlib import Path

from .folder import read_folder
from .gguf_header import read_gguf


def chat_templates(model: Path | None) -> list[str]:
    """Empty without any. Raises ConfigError for a file that cannot be read."""
    if model is None:
        return []
    if model.is_dir():
        return read_folder(model).chat_templates
    template = read_gguf(model).values.get("tokenizer.chat_template")
    return [template] if isinstance(template, str) else []


def context_tokens(model: Path | None) -> int | None:
    """What the files state; None when they do not. Raises ConfigError."""
    if model is None:
        return None
    if model.is_dir():
        return read_folder(model).context_tokens
    stated = read_gguf(model).of_architecture().get("context_length")
    return int(stated) if stated else None
