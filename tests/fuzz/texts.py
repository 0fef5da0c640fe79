"""Texts to fuzz with: adversarial, long and random ones, and every character of Unicode in places where its class
decides how a text is parted.

Owns the choice of characters and places. Engines are built with tables of different Unicode versions: random texts hit
a character that they class differently once in a hundred thousand, this always.
"""

from __future__ import annotations

import random
import sys
import unicodedata
from collections.abc import Iterable, Iterator

import numpy as np
from tritandem.contracts.arrays import Int32Array
from tritandem.tokenizer.encode.adversarial import long_texts, short_texts, unicode_text
from tritandem.tokenizer.encode.fast import FastEncoder

from .claims import Subject

LONG_EVERY = 2000  # texts between two rounds of long ones
PLACES = ("a{}b", " {}1", "  {} x", "1{}2", "{}'s", "\n{}\n", "{}{}", "'{}")
BATCH = 2000
ALIKE = 97  # of ideographs beyond the third plane, private and unassigned characters, one in so many


def texts(rng: random.Random, count: int, it: Subject) -> Iterator[str]:
    """`count` texts: one in ten is plain random Unicode; long ones come on top."""
    short = short_texts(rng, count, it.added)
    for index, text in enumerate(short):
        yield unicode_text(rng, rng.randint(1, 60)) if index % 10 == 9 else text
        if index % LONG_EVERY == LONG_EVERY - 1:
            yield from long_texts(rng, rng.randint(900, 9000))


def all_characters() -> Iterator[str]:
    """Without surrogates, and without most of those that are all alike."""
    for code in range(0x20, sys.maxunicode + 1):
        if unicodedata.category(chr(code)) != "Cs" and (code < 0x34000 or code >> 8 == 0xE00 or code % ALIKE == 0):
            yield chr(code)


def that_part_texts() -> Iterator[str]:
    """Those whose class says more than "letter" or "nothing": numbers, marks, spaces, punctuation, cased letters."""
    return (char for char in all_characters() if unicodedata.category(char) not in ("Lo", "Cn", "Co"))


def wrong_about(it: Subject, chars: Iterable[str], places: Iterable[str] = PLACES) -> list[str]:
    """The texts that the fast engine neither encodes as the reference does nor refuses. Empty without a fast engine."""
    fast = it.fast
    if fast is None:
        return []
    texts = [place.format(char, char) for place in places for char in chars if not fast.vetoes(char)]
    wrong: list[str] = []
    for begin in range(0, len(texts), BATCH):
        some = texts[begin : begin + BATCH]
        expected = it.whole.encode_batch(some, True)
        found = [_ids_or_none(fast, text) for text in some]
        wrong += [
            text
            for text, ids, right in zip(some, found, expected, strict=True)
            if ids is not None and not np.array_equal(ids, right)
        ]
    return wrong


def _ids_or_none(fast: FastEncoder, text: str) -> Int32Array | None:
    try:
        return fast.encode(text, True)
    except ValueError:  # it refuses this one
        return None
