"""Overlap merging as in LoPT (arXiv 2511.04952), for the test that shows why it is not used."""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer
from tritandem.contracts.arrays import Int32Array

Token = tuple[int, int, int]  # start, end in the text, id


def merge_overlapping_chunks(
    tokenizer: Tokenizer, text: str, chunk_chars: int, overlap_chars: int, agree: int
) -> Int32Array:
    """Encode overlapping chunks and join neighbours where `agree` tokens in a row agree in place and id. int32 [n].

    Raises ValueError where no such place exists (the method then grows the overlap).
    """
    merged: list[Token] = []
    for begin in range(0, len(text), chunk_chars - overlap_chars):
        encoding = tokenizer.encode(text[begin : begin + chunk_chars], add_special_tokens=False)
        spans = zip(encoding.offsets, encoding.ids, strict=True)
        chunk = [(begin + start, begin + end, token) for (start, end), token in spans]
        merged = _joined(merged, chunk, agree) if merged else chunk
        if begin + chunk_chars >= len(text):
            break
    return np.array([token for _, _, token in merged], dtype=np.int32)


def _joined(left: list[Token], right: list[Token], agree: int) -> list[Token]:
    places = {token: at for at, token in enumerate(left)}
    for at in range(len(right) - agree + 1):
        place = places.get(right[at])
        if place is not None and left[place : place + agree] == right[at : at + agree]:
            return left[:place] + right[at:]
    raise ValueError("no agreement in the overlap")
