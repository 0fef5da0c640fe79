"""The fast path: `fastokens`, used only while it gives exactly the ids of `tokenizers`.

Owns the loading of the optional package, the veto for texts known to differ and the switch that turns it off for
good. Knows nothing about how equality is proven. Thread-safe; calls release the GIL.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Sequence
from importlib import metadata
from itertools import pairwise
from typing import Any

import numpy as np

from ..contracts import Int32Array
from .adversarial import WORDS
from .pretokenizers import GPT2
from .source import TokenizerSource

MIN_VERSION = (0, 3, 5)  # older ones give other ids for some texts, silently
LONG_S = "\u017f"  # (?i:'s) matches it as an s; the engines disagree

log = logging.getLogger("tritandem.tokenizer")


class FastEncoder:
    """`fastokens` over one tokenizer. `enabled` turns False once and never True again."""

    name = "fast"

    def __init__(self, native: Any, folds_case: bool) -> None:
        self._native = native
        self._folds_case = folds_case
        self.enabled = True

    def vetoes(self, text: str) -> bool:
        """Whether this text is known to come out differently."""
        return self._folds_case and not text.isascii() and LONG_S in text

    def encode(self, text: str, add_special_tokens: bool) -> Int32Array:
        """int32 [n], read-only. Raises whatever the engine raises for text it refuses."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[Int32Array]:
        """One int32 array a text, all from one call. Raises if the engine refuses any of them."""
        ids_bytes, offset_bytes = self._native.encode_batch_flat(list(texts), add_special_tokens)
        ids = np.frombuffer(ids_bytes, dtype=np.int32)  # written as uint32; no vocabulary comes near 2^31
        offsets = np.frombuffer(offset_bytes, dtype=np.uint64).tolist()
        return [ids[begin:end] for begin, end in pairwise(offsets)]

    def switch_off(self, reason: str) -> None:
        """From now on every text takes the slow path."""
        if self.enabled:
            self.enabled = False
            log.error("fast tokenizer switched off: %s", reason)


def load_fast(source: TokenizerSource) -> FastEncoder | None:
    """The engine for this tokenizer, unproven; None without the package, with an old one, or if it refuses."""
    try:
        version = metadata.version("fastokens")
    except metadata.PackageNotFoundError:
        log.info("fastokens is not installed: texts take the slow path")
        return None
    if _version_tuple(version) < MIN_VERSION:
        log.warning("fastokens %s is too old: texts take the slow path; 0.3.5 or newer is needed", version)
        return None
    try:
        from fastokens import Tokenizer

        spec = with_regex_written_out(source.spec)
        return FastEncoder(Tokenizer.from_json_str(json.dumps(spec, ensure_ascii=False)), "(?i:" in source.json_text)
    except Exception as error:  # a Rust extension's refusal comes as any class
        log.warning("fastokens refuses this tokenizer (%s): texts take the slow path", error)
        return None


def with_regex_written_out(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer with GPT-2's regex as a `Split` in front of `ByteLevel`, where `ByteLevel` hides it.

    fastokens takes two to four times as long over the hidden form.
    """
    pre_tokenizer = spec["pre_tokenizer"] or {}
    parts = pre_tokenizer["pretokenizers"] if pre_tokenizer.get("type") == "Sequence" else [pre_tokenizer]
    last = parts[-1] if parts else {}
    if last.get("type") != "ByteLevel" or not last.get("use_regex", True) or last["add_prefix_space"]:
        return spec
    split = {"type": "Split", "pattern": {"Regex": GPT2}, "behavior": "Isolated", "invert": False}
    written_out = [*parts[:-1], split, {**last, "use_regex": False}]
    return {**spec, "pre_tokenizer": {"type": "Sequence", "pretokenizers": written_out}}


def warm_up(fast: FastEncoder) -> None:
    """Its first calls take 3 to 400 ms (tables, threads): let no request pay for them."""
    words = " ".join(WORDS)
    for text in ("warm up", words, words * 100):
        with contextlib.suppress(Exception):  # refusing these words is no reason against the engine
            fast.encode(text, True)


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:3])
