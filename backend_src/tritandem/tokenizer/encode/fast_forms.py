"""Other spellings of a tokenizer, with the same ids, for which fastokens has a scanner of its own.

Owns the conditions under which two spellings are equal. fastokens recognises pre-tokenizers by their exact form; what
it does not recognise goes through a regex engine, six times as long. Knows nothing about encoding.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..files.pretokenizers import GPT2

ASCII_DIGITS = "0123456789"
PLANES_WITH_NUMBERS_END = 0x20000


def recognised_form(spec: dict[str, Any]) -> dict[str, Any] | None:
    """A twin of `spec` with GPT-2's regex alone as pre-tokenizer, which has a scanner; None without one.

    The twin is exact for every text, or, where `parts_at_digits(spec)`, for texts without other numbers than 0 to 9.
    """
    parts = _parts(spec["pre_tokenizer"])
    if not parts or parts[-1]["type"] != "ByteLevel" or not parts[-1].get("use_regex", True):
        return None
    if len(parts) == 1:
        return {**spec, "pre_tokenizer": parts[-1]}
    if parts_at_digits(spec):
        digits = [_as_added_token(digit, spec["model"]["vocab"][digit]) for digit in ASCII_DIGITS]
        return {**spec, "pre_tokenizer": parts[-1], "added_tokens": [*spec["added_tokens"], *digits]}
    return None


def parts_at_digits(spec: dict[str, Any]) -> bool:
    """Whether the first pre-tokenizer sets every digit apart and added tokens in its place would do the same.

    An added token parts a text before anything else sees it, and so does `Digits` when no normalizer stands before
    it. An added token of one character that no other added token contains changes no other match.
    """
    parts = _parts(spec["pre_tokenizer"])
    if [part["type"] for part in parts] != ["Digits", "ByteLevel"] or spec["normalizer"] is not None:
        return False
    digits, byte_level = parts
    model, added = spec["model"], [token["content"] for token in spec["added_tokens"]]
    return (
        bool(digits["individual_digits"])
        and not byte_level["add_prefix_space"]  # it would put a space in front of every digit
        and model["type"] == "BPE"
        and not model.get("dropout")
        and all(digit in model["vocab"] for digit in ASCII_DIGITS)
        and not any(char.isnumeric() for content in added for char in content)
    )


def with_regex_written_out(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer with GPT-2's regex as a `Split` in front of `ByteLevel`, where `ByteLevel` hides it.

    fastokens takes two to four times as long over the hidden form when it stands behind another pre-tokenizer.
    """
    parts = _parts(spec["pre_tokenizer"])
    last = parts[-1] if parts else {}
    if last.get("type") != "ByteLevel" or not last.get("use_regex", True) or last["add_prefix_space"]:
        return spec
    split = {"type": "Split", "pattern": {"Regex": GPT2}, "behavior": "Isolated", "invert": False}
    written_out = [*parts[:-1], split, {**last, "use_regex": False}]
    return {**spec, "pre_tokenizer": {"type": "Sequence", "pretokenizers": written_out}}


class ByNumbers:
    """Two native tokenizers with the same ids: `recognised` for texts whose only numbers are 0 to 9, else `general`."""

    def __init__(self, recognised: Any, general: Any) -> None:
        self._recognised = recognised
        self._general = general

    def encode_batch_flat(self, texts: Sequence[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
        """As `fastokens.Tokenizer.encode_batch_flat`."""
        native = self._general if any(map(has_other_numbers, texts)) else self._recognised
        found: tuple[bytes, bytes] = native.encode_batch_flat(texts, add_special_tokens)
        return found


def has_other_numbers(text: str) -> bool:
    r"""Whether a character of `text` may be in \p{N} without being 0 to 9. Raises UnicodeEncodeError for surrogates."""
    if text.isascii():
        return False
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return bool(_other_number_table().take(codes[codes > 0x7F], mode="clip").any())


@cache
def _other_number_table() -> npt.NDArray[np.bool_]:
    """By code point. Characters that this Python does not know count as numbers: an engine with newer tables may.

    The last entry stands for all planes from the third on: ideographs, tags and private use.
    """
    unsure = [unicodedata.category(chr(code)) in ("Nd", "Nl", "No", "Cn") for code in range(PLANES_WITH_NUMBERS_END)]
    return np.array([*unsure, False])


def _parts(pre_tokenizer: Any) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    if pre_tokenizer["type"] == "Sequence":
        return [leaf for part in pre_tokenizer["pretokenizers"] for leaf in _parts(part)]
    return [pre_tokenizer]


def _as_added_token(content: str, token: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"id": token, "content": content, **flags}
