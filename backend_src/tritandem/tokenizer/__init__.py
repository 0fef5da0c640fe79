"""Text to ids and back: engines with proof of equality, chat templates, streaming detokenizer.

Tier 2. Knows nothing about requests, scheduling, Triton or devices.
"""

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
