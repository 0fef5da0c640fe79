"""The fast engine works only while it is equal: veto, refusal, start-up check, shadow check, switch-off."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from tritandem.config import TokenizerConfig
from tritandem.tokenizer import TextTokenizer, load_tokenizer
from tritandem.tokenizer.encode.counters import Counters
from tritandem.tokenizer.encode.engines import Engines
from tritandem.tokenizer.encode.fast import FastEncoder, load_fast
from tritandem.tokenizer.encode.self_check import first_difference, proven_equal
from tritandem.tokenizer.encode.shadow import ShadowCheck

from tests.fuzz.claims import Subject

pytest.importorskip("fastokens", reason="the optional package fastokens is not installed")


class LyingNative:
    """Says what the real engine says, except about texts that hold `word`."""

    def __init__(self, real: FastEncoder, word: str, refuse: bool = False) -> None:
        self._real, self._word, self._refuse = real._native, word, refuse

    def encode_batch_flat(self, texts: Sequence[str], add_special_tokens: bool) -> tuple[bytes, bytes]:
        ids, offsets = self._real.encode_batch_flat(texts, add_special_tokens)
        if any(self._word in text for text in texts):
            if self._refuse:
                raise ValueError("cannot encode this")
            return bytes(len(ids)), offsets
        return ids, offsets


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Verdicts of lying engines must not reach the real cache."""
    monkeypatch.setattr("tritandem.tokenizer.encode.self_check.cache_root", lambda: tmp_path)


def liar(it: Subject, word: str, refuse: bool = False) -> FastEncoder:
    assert it.fast is not None
    return FastEncoder(LyingNative(it.fast, word, refuse), folds_case=False)


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
def test_a_lie_is_found_at_start_up_and_remembered(
    it: Subject, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lying = liar(it, "camelCase")
    difference = first_difference(lying, it.whole, it.source)
    assert difference is not None
    assert "camelCase" in difference
    with caplog.at_level(logging.ERROR):
        assert not proven_equal(lying, it.whole, it.source)
    assert it.fast is not None
    assert not proven_equal(it.fast, it.whole, it.source), "the verdict on disk was not used"
    for file in tmp_path.rglob("*.json"):
        file.write_text("damaged")
    assert proven_equal(it.fast, it.whole, it.source)
    assert proven_equal(lying, it.whole, it.source), "the verdict on disk was not used"


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
def test_a_mismatch_in_the_shadow_switches_off_for_good(it: Subject, caplog: pytest.LogCaptureFixture) -> None:
    lying, counters = liar(it, "secret"), Counters()
    shadow = ShadowCheck(lying, it.whole, 1.0, counters)
    shadow.offer("honest", True, lying.encode("honest", True))
    shadow.offer("a secret word", True, lying.encode("a secret word", True))
    with caplog.at_level(logging.ERROR):
        shadow.close()
    assert counters.snapshot().shadow_mismatches == 1
    assert not lying.enabled
    assert "switched off" in caplog.text
    assert "secret" not in caplog.text, "a user's text is in the log"


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
def test_a_refusal_sends_only_that_text_to_the_slow_path(it: Subject) -> None:
    engines = Engines(it.source, TokenizerConfig(), Counters())
    assert engines.fast_enabled
    engines._fast._native = LyingNative(it.fast, "refused", refuse=True)  # type: ignore[union-attr, arg-type]
    found = [engines.encode(text, True, True) for text in ("fine", "is refused", "fine too")]
    assert [ids.engine for ids in found] == ["fast", "pieces", "fast"]
    assert np.array_equal(found[1].ids, it.whole.encode("is refused", True))
    assert engines.fast_enabled
    engines.close()


@pytest.mark.parametrize("it", ["qwen2"], indirect=True)
def test_texts_known_to_differ_are_vetoed(it: Subject) -> None:
    assert it.fast is not None
    assert it.fast.vetoes("it'\u017f")
    assert not it.fast.vetoes("it's 漢字")


def test_it_serves_ordinary_text_and_without_it_everything_works(
    smollm2_folder: Path, tokenizer: TextTokenizer
) -> None:
    assert tokenizer.encode("ordinary").engine == "fast"
    without = load_tokenizer(smollm2_folder, replace(TokenizerConfig(), fast=False))
    assert without.encode("ordinary").engine == "pieces"
    assert np.array_equal(without.encode("ordinary").ids, tokenizer.encode("ordinary").ids)


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
def test_an_old_version_is_not_used(it: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.3.4")
    assert load_fast(it.source) is None
    monkeypatch.setattr(metadata, "version", lambda name: "0.10.0")
    assert load_fast(it.source) is not None


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
def test_a_missing_package_means_the_slow_path(it: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert load_fast(it.source) is None
