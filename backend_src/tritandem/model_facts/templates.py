"""The chat templates of a model, as texts: of a Hugging Face folder or a GGUF file."""

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
