"""The reference: one text, one call to `tokenizers`.

Owns the call and the turning of its ids into an int32 array. Knows nothing about cuts, caches or other engines.
Thread-safe: `encode_batch_fast` releases the GIL (`Tokenizer.encode` would hold it for 200 ms on 114k tokens) and
nobody changes this tokenizer's truncation or padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from ...contracts.arrays import Int32Array


class WholeEncoder:
    """Encodes every text whole; exact by definition and the slow twin of all else."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool) -> Int32Array:
        """int32 [n]. Raises UnicodeEncodeError for lone surrogates, whatever the installed version calls them."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[Int32Array]:
        """One int32 array a text, from one call. Raises UnicodeEncodeError if any holds a lone surrogate."""
        for text in texts:
            text.encode("utf-8")  # `tokenizers` answers a lone surrogate with a TypeError about something else
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]
