"""The slow path: a long text cut at safe places, the pieces encoded side by side.

Owns the threads that help with pieces. Knows nothing about the rules themselves. Any thread may call; it works on its
own text, and helpers come to whoever called first.
"""

# Merging overlapping chunks where their tokens agree (LoPT, arXiv 2511.04952) is not done here: with \p{N}{1,3} the
# groups of a digit run depend on where the run began, single-character tokens then agree at every place although
# the grouping does not, and the merged ids are silently wrong. It was slower, too.

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ...contracts.arrays import Int32Array
from .affixes import Affixes
from .safe_cuts import CutRules
from .short_first import ShortFirst
from .whole import WholeEncoder

NOT_YET: Int32Array = np.empty(0, np.int32)


class PieceEncoder:
    """Exactly the ids of `whole`, from pieces. Pieces pay on one core as well: `tokenizers` is quicker on small texts.

    A text of up to `short_chars` characters is encoded by the caller alone and at once; the pieces of longer ones wait
    for shorter texts at `gate`.
    """

    def __init__(
        self,
        whole: WholeEncoder,
        rules: CutRules,
        affixes: Affixes,
        piece_chars: int,
        threads: int,
        short_chars: int = 0,
        gate: ShortFirst | None = None,
    ) -> None:
        self._whole = whole
        self._rules = rules
        self._affixes = affixes
        self._piece_chars = max(1, piece_chars)
        self._short_chars = short_chars
        self._gate = gate or ShortFirst()
        self._helpers = threads - 1
        self._pool = ThreadPoolExecutor(self._helpers, thread_name_prefix="encode-piece") if threads > 1 else None

    def encode(self, text: str, add_special_tokens: bool) -> Int32Array:
        """int32 [n]."""
        pieces = self._rules.pieces(text, self._piece_chars)
        if len(text) <= self._short_chars:
            parts = self._whole.encode_batch(list(pieces), False)  # one call: waiting for the interpreter once
        else:
            with self._gate.text(len(text)):
                parts = self._side_by_side(pieces, len(text))
        return self._affixes.around(parts, add_special_tokens)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)

    def _side_by_side(self, pieces: Iterator[str], chars: int) -> list[Int32Array]:
        parts: list[Int32Array] = []
        cutting = threading.Lock()

        def work() -> None:
            while True:
                self._gate.pause(chars)
                with cutting:
                    piece = next(pieces, None)
                    if piece is None:
                        return
                    turn = len(parts)
                    parts.append(NOT_YET)
                parts[turn] = self._whole.encode(piece, False)

        helping = [self._pool.submit(work) for _ in range(self._helpers)] if self._pool is not None else []
        work()
        for helper in helping:
            if not helper.cancel():  # one that has not begun has nothing left to do
                helper.result()
        return parts
