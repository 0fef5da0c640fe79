"""The slow path: a long text cut at safe places, the pieces encoded side by side.

Owns the threads that encode pieces. Knows nothing about the rules themselves. Any thread may call; pieces of
several texts share the workers in the order they came.
"""

# Merging overlapping chunks where their tokens agree (LoPT, arXiv 2511.04952) is not done here: with \p{N}{1,3} the
# groups of a digit run depend on where the run began, single-character tokens then agree at every place although
# the grouping does not, and the merged ids are silently wrong. It was slower, too.

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ..contracts import Int32Array
from .affixes import Affixes
from .safe_cuts import CutRules
from .whole import WholeEncoder


class PieceEncoder:
    """Exactly the ids of `whole`, from pieces."""

    name = "pieces"

    def __init__(self, whole: WholeEncoder, rules: CutRules, affixes: Affixes, piece_chars: int, threads: int) -> None:
        self._whole = whole
        self._rules = rules
        self._affixes = affixes
        self._piece_chars = max(1, piece_chars)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="encode-piece") if threads > 1 else None

    def encode(self, text: str, add_special_tokens: bool) -> Int32Array:
        """int32 [n]."""
        pieces = self._rules.split(text, self._piece_chars)
        if self._pool is None or len(pieces) == 1:
            parts = [self._encode_piece(piece) for piece in pieces]
        else:
            parts = list(self._pool.map(self._encode_piece, pieces))
        return self._affixes.around(parts, add_special_tokens)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _encode_piece(self, piece: str) -> Int32Array:
        return self._whole.encode(piece, False)
