"""The engines of one model and the order in which a text tries them.

Owns the reference tokenizer, its twin that knows no control tokens, and the choice of the engine for one text.
Knows nothing about batches, threads of callers or requests. Any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..config import TokenizerConfig
from ..contracts import Int32Array
from .chat import control_tokens
from .counters import Counters
from .plain import PlainEncoder
from .segments import Segment
from .source import TokenizerSource
from .whole import WholeEncoder


class Engines:
    """Encodes one text exactly as `tokenizers` would, by the fastest engine that is proven to."""

    def __init__(self, source: TokenizerSource, config: TokenizerConfig, counters: Counters) -> None:
        self.reference = source.new_tokenizer()
        template = getattr(source.renderer, "chat_template", None)
        control = control_tokens(source.added_tokens, template)
        self._whole = WholeEncoder(self.reference)
        self._plain = PlainEncoder(source, control)
        self._counters = counters

    def encode(self, text: str, add_special_tokens: bool, parse_special_tokens: bool) -> tuple[Int32Array, str, int]:
        """(int32 ids [n], engine, how many ids the prefix cache gave)."""
        if not parse_special_tokens:
            return self._plain.encode(text, add_special_tokens), "whole", 0
        return self._whole.encode(text, add_special_tokens), "whole", 0

    def encode_segments(self, segments: Sequence[Segment]) -> tuple[Int32Array, str]:
        """(int32 ids [n], engine) of a rendered chat whose messages hold text that looks like control tokens."""
        return self._plain.encode_segments(segments), "whole"

    def present(self) -> dict[str, int | bool]:
        """What only the engines know, for TokenizerStats."""
        return {"fast_enabled": False}

    def close(self) -> None:
        """Stop background work."""
