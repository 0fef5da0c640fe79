"""The fast path: `fastokens`, used only while it gives exactly the ids of `tokenizers`.

Owns the loading of the optional package, the veto for texts known to differ and the switch that turns it off for
good. Knows nothing about how equality is proven. Thread-safe; calls release the GIL.
"""

from __future__ import annotations

import contextlib
import json
import logging
from importlib import metadata
from typing import Any

import numpy as np

from ...contracts.arrays import Int32Array
from ..files.source import TokenizerSource
from .adversarial import WORDS
from .fast_forms import ByNumbers, parts_at_digits, recognised_form, with_regex_written_out

MIN_VERSION = (0, 3, 5)  # older ones give other ids for some texts, silently
LONG_S = "\u017f"  # (?i:'s) matches it as an s; the engines disagree
VOWEL_SEPARATOR = "\u180e"  # white space until Unicode 6.3; the engines disagree on that, too

log = logging.getLogger("tritandem.tokenizer")


class FastEncoder:
    """`fastokens` over one tokenizer. `enabled` turns False once and never True again."""

    def __init__(self, native: Any, folds_case: bool) -> None:
        self._native = native
        self._folds_case = folds_case
        self.enabled = True

    def vetoes(self, text: str) -> bool:
        """Whether this text is known to come out differently."""
        if text.isascii():
            return False
        return VOWEL_SEPARATOR in text or (self._folds_case and LONG_S in text)

    def encode(self, text: str, add_special_tokens: bool) -> Int32Array:
        """int32 [n], read-only. Raises whatever the engine raises for text it refuses."""
        ids, _ = self._native.encode_batch_flat([text], add_special_tokens)
        return np.frombuffer(ids, dtype=np.int32)  # written as uint32; no vocabulary comes near 2^31

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
        return FastEncoder(_native(source.spec), "(?i:" in source.json_text)
    except Exception as error:  # a Rust extension's refusal comes as any class
        log.warning("fastokens refuses this tokenizer (%s): texts take the slow path", error)
        return None


def _native(spec: dict[str, Any]) -> Any:
    """fastokens over the quickest form of this tokenizer. Raises whatever fastokens raises for what it cannot do."""
    from fastokens import Tokenizer

    def build(form: dict[str, Any]) -> Any:
        return Tokenizer.from_json_str(json.dumps(form, ensure_ascii=False))

    recognised, general = recognised_form(spec), with_regex_written_out(spec)
    if recognised is None:
        return build(general)
    return ByNumbers(build(recognised), build(general)) if parts_at_digits(spec) else build(recognised)


def warm_up(fast: FastEncoder) -> None:
    """Its first calls take 3 to 400 ms (tables, threads): let no request pay for them."""
    words = " ".join(WORDS)
    for text in ("warm up", words, words * 100):
        with contextlib.suppress(Exception):  # refusing these words is no reason against the engine
            fast.encode(text, True)


def _version_tuple(version: str) -> tuple[int, ...]:
    return tuple(int(part) if part.isdigit() else 0 for part in version.split(".")[:3])
