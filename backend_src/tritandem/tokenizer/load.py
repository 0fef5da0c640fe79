"""From a model's files to a ready tokenizer.

Owns the two entry points for other rooms. Start-up only.
"""

from __future__ import annotations

from pathlib import Path

from ..config import TokenizerConfig
from .decode.text_streams import TextStreams
from .encode.threads import use_own_threads_only
from .files.source import read_source
from .text_tokenizer import TextTokenizer


def load_tokenizer(folder: Path, config: TokenizerConfig) -> TextTokenizer:
    """The tokenizer in a Hugging Face folder or a `.gguf` file, proven and warm. Raises ConfigError."""
    use_own_threads_only()
    return TextTokenizer(read_source(folder), config)


def load_text_streams(folder: Path) -> TextStreams:
    """Only the detokenizer, for a process that never encodes. Raises ConfigError."""
    return TextStreams(read_source(folder))
