"""Vocabularies as fixtures, loaded once a session; a test that needs an unreachable one is skipped with the reason."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from tritandem.config import TokenizerConfig
from tritandem.tokenizer import TextTokenizer, load_tokenizer

from tests.fuzz.claims import Subject, subject
from tests.fuzz.vocabularies import Unavailable, vocabulary_folder


@cache
def _subject(name: str) -> Subject:
    return subject(vocabulary_folder(name))


def subject_or_skip(name: str) -> Subject:
    """The vocabulary `name` with its engines; skips where it cannot be had."""
    try:
        return _subject(name)
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture
def it(request: pytest.FixtureRequest) -> Subject:
    """A vocabulary, named by indirect parametrisation."""
    return subject_or_skip(request.param)


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    try:
        return vocabulary_folder("smollm2")
    except Unavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def tokenizer(smollm2_folder: Path) -> TextTokenizer:
    """SmolLM2's tokenizer as a server would load it; shared, so tests compare counters before and after."""
    return load_tokenizer(smollm2_folder, TokenizerConfig())
