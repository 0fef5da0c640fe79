"""What `add_special_tokens` puts around a text: the ids in front of it and after it.

Pure. Knows that a post-processor is a template around one sequence, and proves it before anyone relies on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...contracts.arrays import Int32Array
from .whole import WholeEncoder


@dataclass(frozen=True, slots=True)
class Affixes:
    """The ids around every text, usually BOS in front or nothing at all."""

    head: Int32Array
    tail: Int32Array

    def around(self, parts: list[Int32Array], add_special_tokens: bool) -> Int32Array:
        """The ids of a text from the ids of its parts."""
        if add_special_tokens:
            parts = [self.head, *parts, self.tail]
        return self.join(parts)

    @staticmethod
    def join(parts: list[Int32Array]) -> Int32Array:
        """The parts in a row; a single one as it is."""
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def affixes(encoder: WholeEncoder) -> Affixes | None:
    """Read off from the empty text and proven on others; None if the post-processor does anything else."""
    around = encoder.encode("", True)
    for length in range(len(around) + 1):
        found = Affixes(around[:length], around[length:])
        texts = ("", "a", "Hello world", " x\n", "語、Ω")
        if all(
            np.array_equal(found.around([encoder.encode(text, False)], True), encoder.encode(text, True))
            for text in texts
        ):
            return found
    return None
