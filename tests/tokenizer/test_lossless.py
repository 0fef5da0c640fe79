"""Every engine gives the ids of `tokenizers`, and the claims that say so can be refuted."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritandem.tokenizer.encode.adversarial import long_texts, short_texts
from tritandem.tokenizer.encode.affixes import affixes
from tritandem.tokenizer.encode.safe_cuts import CutRules

from tests.fuzz.claims import Subject, every_cut_is_exact, fast_equals_whole, refute
from tests.fuzz.texts import texts
from tests.tokenizer.overlap_merging import merge_overlapping_chunks

VOCABULARIES = ["smollm2", "qwen2", "deepseek", "mistral"]
TEXTS = 2500


@pytest.mark.parametrize("it", VOCABULARIES, indirect=True)
def test_cuts_fast_engine_and_streams_are_exact_on_adversarial_texts(it: Subject) -> None:
    rng = random.Random(7)
    for text in texts(rng, TEXTS, it):
        assert refute(it, text, rng) is None, repr(text[:300])


@pytest.mark.parametrize("it", VOCABULARIES, indirect=True)
def test_engines_are_exact_on_long_runs(it: Subject) -> None:
    for text in long_texts(random.Random(11), 3000):
        expected = it.whole.encode(text, True)
        assert every_cut_is_exact(it, text, expected) is None, repr(text[:50])
        assert fast_equals_whole(it, text, expected) is None, repr(text[:50])


@pytest.mark.parametrize("it", ["qwen2"], indirect=True)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_unicode_text_is_exact(it: Subject, text: str) -> None:
    assert refute(it, text, random.Random(text)) is None


@pytest.mark.parametrize("it", ["qwen2"], indirect=True)
def test_cuts_are_plentiful_in_ordinary_text(it: Subject) -> None:
    assert it.rules is not None
    text = "It was a dark and stormy night; the rain fell.\nAnd so on.\n" * 40
    assert len(it.rules.split(text, 1)) > 300
    pieces = it.rules.split(text, 200)
    assert "".join(pieces) == text
    assert all(200 <= len(piece) < 230 for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("wrong_cut", "it"), [(r"\s", "qwen2"), (r"\n", "deepseek"), (r"\d", "deepseek"), (" ", "mistral")], indirect=["it"]
)
def test_the_claims_refute_a_wrong_rule(wrong_cut: str, it: Subject) -> None:
    wrong = Subject(it.source, it.whole, it.affixes, CutRules(re.compile(wrong_cut)), None, it.streams)
    rng = random.Random(5)
    sample = short_texts(rng, 100)
    assert any(every_cut_is_exact(wrong, text, it.whole.encode(text, True)) for text in sample)


@pytest.mark.parametrize("it", ["deepseek"], indirect=True)
def test_merging_overlaps_by_equal_tokens_is_lossy_on_digit_runs_and_safe_cuts_are_not(it: Subject) -> None:
    rng = random.Random(3)
    digits = "".join(chr(0xFF10 + rng.randrange(10)) for _ in range(1500))
    expected = it.whole.encode(digits, False)
    merged = merge_overlapping_chunks(it.source.new_tokenizer(), digits, chunk_chars=500, overlap_chars=100, agree=4)
    assert len(merged)
    assert not np.array_equal(merged, expected)
    assert every_cut_is_exact(it, digits, it.whole.encode(digits, True)) is None


@pytest.mark.parametrize("it", ["deepseek"], indirect=True)
def test_merging_overlaps_is_a_fair_copy_of_the_method_it_is_exact_on_prose(it: Subject) -> None:
    prose = " ".join(random.Random(4).choice(["alpha", "beta", "gamma", "delta"]) for _ in range(400))
    merged = merge_overlapping_chunks(it.source.new_tokenizer(), prose, chunk_chars=500, overlap_chars=100, agree=4)
    assert np.array_equal(merged, it.whole.encode(prose, False))


@pytest.mark.parametrize("it", VOCABULARIES, indirect=True)
def test_what_stands_around_every_text_is_read_off(it: Subject) -> None:
    found = affixes(it.whole)
    assert found is not None
    ids = it.whole.encode("some text", False)
    assert np.array_equal(found.around([ids], True), it.whole.encode("some text", True))
