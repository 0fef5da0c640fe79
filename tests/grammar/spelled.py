"""A vocabulary of the 256 bytes and a few special tokens: one id a byte, so that texts are spelled by their bytes."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
from tritandem.grammar import Grammar, Kind, Matcher, Vocabulary, compile_grammar
from tritandem.tokenizer.decode.token_text import byte_alphabet

END, CALL = 256, 257  # </s>, [CALL]
ROWS = 300


@cache
def byte_vocabulary() -> Vocabulary:
    return Vocabulary(byte_tokenizer(), ROWS, [END])


def byte_tokenizer() -> str:
    """Its tokenizer.json."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    spec: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": END, "content": "</s>", **flags, "special": True},
            {"id": CALL, "content": "[CALL]", **flags, "special": True},
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {char: byte for byte, char in enumerate(byte_alphabet())}, "merges": []},
    }
    return json.dumps(spec)


def matcher(kind: Kind, text: Any = "", **more: Any) -> Matcher:
    made = text if isinstance(text, str) else json.dumps(text)
    return compile_grammar(byte_vocabulary(), Grammar(kind, made, **more))


def allowed(at: Matcher) -> set[int]:
    """The ids that may come next."""
    row = np.full(at.vocabulary.words, -1, np.int32)
    at.mask_into(row)
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def takes(at: Matcher, text: str | bytes) -> bool:
    """Whether this is a whole answer; each byte must be in the mask exactly when it is accepted."""
    at = at.copy()
    for byte in text.encode() if isinstance(text, str) else text:
        in_mask = byte in allowed(at)
        assert at.accept(byte) == in_mask
        if not in_mask:
            return False
    assert (END in allowed(at)) == at.may_end()
    return at.may_end()
