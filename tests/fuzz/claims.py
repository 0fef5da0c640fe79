"""What must hold for every text and every vocabulary; the tests and the fuzzer try to refute it.

Owns the claims. Each returns None, or in a few words how it was refuted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tritandem.contracts.arrays import Int32Array
from tritandem.tokenizer.decode.text_streams import TextStreams
from tritandem.tokenizer.encode.affixes import Affixes, affixes
from tritandem.tokenizer.encode.fast import FastEncoder, load_fast
from tritandem.tokenizer.encode.pieces import PieceEncoder
from tritandem.tokenizer.encode.safe_cuts import CutRules, cut_rules
from tritandem.tokenizer.encode.whole import WholeEncoder
from tritandem.tokenizer.files.source import TokenizerSource, read_source


@dataclass(frozen=True)
class Subject:
    """One vocabulary with every engine that takes it."""

    source: TokenizerSource
    whole: WholeEncoder
    affixes: Affixes | None
    rules: CutRules | None
    fast: FastEncoder | None
    streams: TextStreams

    @property
    def added(self) -> list[str]:
        return [token.content for token in self.source.added_tokens][:64]


def subject(folder: Path) -> Subject:
    """Load a vocabulary. Raises ConfigError."""
    source = read_source(folder)
    whole = WholeEncoder(source.new_tokenizer())
    return Subject(source, whole, affixes(whole), cut_rules(source), load_fast(source), TextStreams(source))


def every_cut_is_exact(it: Subject, text: str, expected: Int32Array) -> str | None:
    """Cut at every allowed place, the ids of the pieces are those of the whole."""
    if it.rules is None or it.affixes is None:
        return None
    for piece_chars in (1, 40):
        pieces = PieceEncoder(it.whole, it.rules, it.affixes, piece_chars, threads=1)
        if not np.array_equal(pieces.encode(text, True), expected):
            return f"pieces of {piece_chars} characters: {it.rules.split(text, piece_chars)!r}"
    return None


def fast_equals_whole(it: Subject, text: str, expected: Int32Array) -> str | None:
    """The fast engine gives the reference's ids, refuses aloud, or is not asked."""
    if it.fast is None or it.fast.vetoes(text):
        return None
    try:
        ids = it.fast.encode(text, True)
    except Exception:
        return None
    return None if np.array_equal(ids, expected) else "the fast engine differs"


def streamed_text_equals_decode(it: Subject, ids: Sequence[int], rng: random.Random) -> str | None:
    """However the ids are cut into pushes, the texts add up to transformers' decode."""
    state = it.streams.open(np.empty(0, np.int32))
    text, begin = "", 0
    while begin < len(ids):
        count = min(rng.choice((1, 1, 1, 2, 3, 7)), len(ids) - begin)
        tokens = np.array(ids[begin : begin + count], dtype=np.int32)
        text += it.streams.push([state], tokens, np.array([count], np.int32))[0].text
        begin += count
    text += it.streams.flush(state)
    expected = it.source.renderer.decode(list(ids), skip_special_tokens=True)
    return None if text == expected else f"streamed {text!r}, decode says {expected!r}"


def refute(it: Subject, text: str, rng: random.Random) -> str | None:
    """The first claim that does not hold for `text`, or None."""
    expected = it.whole.encode(text, True)
    return (
        every_cut_is_exact(it, text, expected)
        or fast_equals_whole(it, text, expected)
        or streamed_text_equals_decode(it, expected.tolist(), rng)
    )
