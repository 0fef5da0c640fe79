"""The forms that fastokens recognises have the same ids, and are left alone where they would not."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from typing import Any

import pytest
from tritandem.tokenizer.encode.fast import FastEncoder
from tritandem.tokenizer.encode.fast_forms import ByNumbers, has_other_numbers, parts_at_digits, recognised_form

from tests.fuzz.claims import Subject, fast_equals_whole
from tests.fuzz.texts import that_part_texts, wrong_about

pytest.importorskip("fastokens", reason="the optional package fastokens is not installed")

Change = dict[str, Any]
DIGITS = {"type": "Digits", "individual_digits": True}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PREFIXED = {**BYTE_LEVEL, "add_prefix_space": True}
TAKES_DIGIT = {"id": 7, "content": "<1>", "special": True}
WITHOUT_NINE = {"type": "BPE", "vocab": dict.fromkeys("012345678", 0)}


def sequence(*parts: Change) -> Change:
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": list(parts)}}


def by_numbers(it: Subject) -> ByNumbers:
    assert it.fast is not None
    assert isinstance(it.fast._native, ByNumbers)
    return it.fast._native


@pytest.mark.parametrize("it", ["smollm2", "qwen2"], indirect=True)
def test_every_character_that_parts_texts_is_exact(it: Subject) -> None:
    assert wrong_about(it, that_part_texts(), ("  {} x", "1{}2", "{}'s")) == []


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
def test_the_recognised_form_alone_is_wrong_about_other_numbers_and_the_claim_finds_it(it: Subject) -> None:
    alone = replace(it, fast=FastEncoder(by_numbers(it)._recognised, folds_case=False))
    assert " ²1" in wrong_about(alone, "１²", [" {}1"])


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
@pytest.mark.parametrize("text", ["x² + 12", "１２ ３", "½ 1", "第Ⅷ章  9", "a  1b 22\n\n3 \t4'5", "٣٤ 漢字1", "🙂 7"])
def test_digits_are_set_apart_as_the_reference_does(it: Subject, text: str) -> None:
    assert fast_equals_whole(it, text, it.whole.encode(text, True)) is None


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
def test_the_separator_that_is_space_for_one_engine_is_vetoed(it: Subject) -> None:
    assert it.fast is not None
    assert it.fast.vetoes("  \u180e x")
    assert not it.fast.vetoes("  \u2003 x")


def test_every_number_counts_as_one_and_letters_do_not() -> None:
    chars = map(chr, range(0x80, 0x110000))
    numbers = [char for char in chars if unicodedata.category(char) in ("Nd", "Nl", "No")]
    assert len(numbers) > 1500
    assert all(map(has_other_numbers, numbers))
    assert not has_other_numbers("0123456789")
    assert not has_other_numbers("naïve Straße 漢字一二三 한국어 😀 9 𠀀")


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
@pytest.mark.parametrize(
    ("change", "form"),
    [
        ({}, "digits as added tokens"),
        ({"pre_tokenizer": BYTE_LEVEL}, "alone"),
        (sequence(PREFIXED), "alone"),
        (sequence(DIGITS, PREFIXED), None),
        (sequence(DIGITS, {**BYTE_LEVEL, "use_regex": False}), None),
        (sequence({**DIGITS, "individual_digits": False}, BYTE_LEVEL), None),
        (sequence(DIGITS, DIGITS, BYTE_LEVEL), None),
        ({"normalizer": {"type": "NFKC"}}, None),
        ({"added_tokens": [TAKES_DIGIT]}, None),
        ({"model": WITHOUT_NINE}, None),
        ({"pre_tokenizer": None}, None),
    ],
)
def test_a_form_is_used_only_where_it_is_equal(it: Subject, change: Change, form: str | None) -> None:
    spec = {**it.source.spec, **change}
    found = recognised_form(spec)
    if form is None:
        assert found is None
        return
    assert found is not None
    assert found["pre_tokenizer"]["type"] == "ByteLevel"
    assert parts_at_digits(spec) == (form == "digits as added tokens")
    assert len(found["added_tokens"]) - len(spec["added_tokens"]) == (10 if parts_at_digits(spec) else 0)
