"""Text to ids and back: engines with proof of equality, chat templates, streaming detokenizer.

Tier 2. Knows nothing about requests, scheduling, Triton or devices. What is named here is loaded when it is first
asked for: who wants a chat template alone brings no tokenizer's library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .decode.text_streams import TextState, TextStep, TextStreams
    from .encode.encoded import Encoded, TokenizerStats
    from .load import load_text_streams, load_tokenizer
    from .text_tokenizer import TextTokenizer

__all__ = [
    "Encoded",
    "TextState",
    "TextStep",
    "TextStreams",
    "TextTokenizer",
    "TokenizerStats",
    "load_text_streams",
    "load_tokenizer",
]
_HOMES = {
    **dict.fromkeys(("TextState", "TextStep", "TextStreams"), "decode.text_streams"),
    **dict.fromkeys(("Encoded", "TokenizerStats"), "encode.encoded"),
    **dict.fromkeys(("load_text_streams", "load_tokenizer"), "load"),
    "TextTokenizer": "text_tokenizer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
