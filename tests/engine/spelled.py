"""A vocabulary of VOCAB tokens for the rig's models: printable ASCII, a few longer tokens, one end token."""

from __future__ import annotations

import functools
import json
from typing import Any

import numpy as np
from tritandem.engine.structure.preparing import Preparer
from tritandem.engine.structure.spellings import Spellings
from tritandem.grammar import Vocabulary

from tests.engine.engine_rig import VOCAB

LONGER = (
    "true",
    "false",
    "null",
    '{"',
    '":',
    '",',
    "ab",
    "abc",
    "yes",
    "no",
    "may",
    "be",
    "12",
    "00",
    "\u00c3",
    "\u00a9",
)
SPELLING = [*map(chr, range(33, 127)), "\u0120", "\u010a", *LONGER]  # as byte-level tokenizers write bytes
END = len(SPELLING)  # ids behind it are padding of the model's


@functools.cache
def vocabulary(rows: int = 256) -> Vocabulary:
    return Vocabulary(tokenizer_json(), rows, (END,))


def tokenizer_json() -> str:
    vocab = {piece: number for number, piece in enumerate(SPELLING)}
    merges: list[Any] = []
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": [_added(END, "<end>")],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "vocab": vocab, "merges": merges, "byte_fallback": False},
        }
    )


def _added(number: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": True, **flags}


def text_of(tokens: list[int]) -> str:
    """Without the end token."""
    return b"".join(vocabulary().tokens.decode_bytes([token]) for token in tokens if token != END).decode()


@functools.cache
def spellings() -> Spellings:
    return Spellings(vocabulary().spellings())


def preparer() -> Preparer:
    return Preparer(vocabulary, VOCAB)


def allowed(mask: np.ndarray[Any, np.dtype[np.int32]]) -> list[int]:
    """Ids whose bits are set."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little").nonzero()[0].tolist()
