"""One text never harms another: limits, bad input, counters."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritandem.config import TokenizerConfig
from tritandem.contracts.errors import ConfigError, EngineFailed, InvalidRequest, TritandemError
from tritandem.tokenizer import Encoded, TextTokenizer, load_text_streams, load_tokenizer
from tritandem.tokenizer.encode.threads import encode_threads
from tritandem.tokenizer.files.source import read_source

LONG = "Some words that make a long text. " * 3000  # beyond inline_chars


@pytest.fixture(scope="module")
def slow(smollm2_folder: Path) -> TextTokenizer:
    """Without the fast engine and with pieces small enough for a test."""
    return load_tokenizer(smollm2_folder, replace(TokenizerConfig(), fast=False, piece_chars=500, threads=2))


def encoded(tokenizer: TextTokenizer, texts: Sequence[str], **options: Any) -> list[Encoded | TritandemError]:
    """All submitted before the first is waited for."""
    futures = [tokenizer.submit(text, **options) for text in texts]
    errors = [future.exception(timeout=60) for future in futures]
    assert all(error is None or isinstance(error, TritandemError) for error in errors)
    return [error or future.result() for error, future in zip(errors, futures, strict=True)]  # type: ignore[misc]


def test_one_bad_text_harms_no_other(tokenizer: TextTokenizer) -> None:
    texts = ["good", "bad \ud800", "x" * 3000, "", "also good 😀", "nul \x00 byte"]
    results = encoded(tokenizer, texts, max_tokens=30)
    assert [type(result) for result in results] == [Encoded, InvalidRequest, InvalidRequest, Encoded, Encoded, Encoded]
    assert "U+D800 at character 4" in str(results[1])
    for text, result in zip(texts, results, strict=True):
        if isinstance(result, Encoded):
            assert result.ids.dtype == np.int32
            assert np.array_equal(result.ids, tokenizer._engines._whole.encode(text, True))


def test_fast_and_slow_engines_agree_on_texts_of_every_kind(tokenizer: TextTokenizer, slow: TextTokenizer) -> None:
    texts = ["a", LONG, "<|im_start|>user\nhi<|im_end|>", "漢字。" * 100, "x" * 20_000, ""]
    fast_results, slow_results = encoded(tokenizer, texts), encoded(slow, texts)
    for fast_result, slow_result in zip(fast_results, slow_results, strict=True):
        assert isinstance(fast_result, Encoded)
        assert isinstance(slow_result, Encoded)
        assert np.array_equal(fast_result.ids, slow_result.ids)
    assert {result.engine for result in slow_results if isinstance(result, Encoded)} == {"pieces"}


def test_short_texts_are_answered_while_long_ones_that_came_before_wait(slow: TextTokenizer) -> None:
    gate, blocked = threading.Event(), threading.Event()

    def hold() -> None:
        blocked.set()
        gate.wait(30)

    holders = [slow._pool.submit(hold) for _ in range(slow._pool._max_workers)]
    assert blocked.wait(30)
    long_future, short_future = slow.submit(LONG), slow.submit("short")
    assert short_future.done()
    assert not long_future.done()
    assert slow.stats().queue_size == 1
    gate.set()
    assert len(long_future.result(timeout=60).ids) > 1000
    assert long_future.result().queue_ns > 0
    for holder in holders:
        holder.result(timeout=30)


def test_over_long_text_is_refused_before_it_costs_time(tokenizer: TextTokenizer) -> None:
    huge = "x" * 10_000_000
    begun = time.process_time()
    with pytest.raises(InvalidRequest, match="10000000 characters"):
        tokenizer.encode(huge, max_tokens=8192)
    assert time.process_time() - begun < 0.05


def test_a_text_of_the_longest_entries_is_not_refused_by_characters(tokenizer: TextTokenizer) -> None:
    spelled = max((t for t in tokenizer._source.spellings.values() if t.isascii()), key=len)
    text = spelled * 5
    tokens = len(tokenizer.encode(text).ids)
    assert len(tokenizer.encode(text, max_tokens=tokens).ids) == tokens
    with pytest.raises(InvalidRequest, match=f"{tokens} tokens"):
        tokenizer.encode(text, max_tokens=tokens - 1)


def test_one_giant_word_is_encoded_in_bounded_time(tokenizer: TextTokenizer, slow: TextTokenizer) -> None:
    word = "abcdefghij" * 50_000
    begun = time.process_time()
    assert np.array_equal(tokenizer.encode(word).ids, slow.encode(word).ids)
    assert time.process_time() - begun < 20


def test_an_engine_that_breaks_fails_its_text_only(slow: TextTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = slow._engines._pieces.encode  # type: ignore[union-attr]

    def breaks(text: str, special: bool) -> object:
        if text == "break":
            raise MemoryError("no memory")
        return encode(text, special)

    monkeypatch.setattr(slow._engines._pieces, "encode", breaks)
    good, bad = encoded(slow, ["fine", "break"])
    assert isinstance(good, Encoded)
    assert isinstance(bad, EngineFailed)


def test_every_text_is_counted_once(smollm2_folder: Path) -> None:
    counted = load_tokenizer(smollm2_folder, replace(TokenizerConfig(), fast=False))
    results = encoded(counted, ["one", "two words", "bad \ud800", LONG])
    stats = counted.stats()
    assert (stats.queue_size, stats.fast_enabled) == (0, False)
    assert sum(stats.texts.values()) == 3
    assert sum(stats.tokens.values()) == sum(len(result.ids) for result in results if isinstance(result, Encoded))
    counted.close()


def test_facts_about_the_model(tokenizer: TextTokenizer) -> None:
    assert tokenizer.vocab_size == 49152
    assert tokenizer.end_ids == (2,)
    assert tokenizer.encode_word(" hello") == (33662,)


def test_the_detokenizer_loads_alone(smollm2_folder: Path, tokenizer: TextTokenizer) -> None:
    streams = load_text_streams(smollm2_folder)
    ids = tokenizer.encode("alone 😀").ids
    state = streams.open(ids[:0])
    assert streams.push([state], ids, np.array([len(ids)], np.int32))[0].text == "alone 😀"


def _folder_with(source: Path, folder: Path, **files: dict[str, object]) -> Path:
    """The tokenizer in `source` beside JSON files of other content."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((source / name).read_bytes())
    for name, values in files.items():
        (folder / f"{name}.json").write_text(json.dumps(values))
    return folder


def test_the_models_end_tokens_and_the_tokenizers_own_end_an_answer(smollm2_folder: Path, tmp_path: Path) -> None:
    model = {"model_type": "llama", "vocab_size": 49152, "eos_token_id": 0}
    folder = _folder_with(smollm2_folder, tmp_path, config=model, generation_config={"eos_token_id": 0})
    assert read_source(folder).end_ids == (0, 2)


def test_the_tokenizer_of_another_model_is_refused(smollm2_folder: Path, tmp_path: Path) -> None:
    folder = _folder_with(smollm2_folder, tmp_path, config={"model_type": "llama", "vocab_size": 49000})
    with pytest.raises(ConfigError, match=r"152 tokens of the tokenizer have no row in the model's embedding"):
        read_source(folder)


@pytest.mark.parametrize("content", [None, "{", '{"model": 5}'])
def test_a_folder_without_a_sound_tokenizer_is_a_config_error(tmp_path: Path, content: str | None) -> None:
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        (folder / "tokenizer.json").write_text(content)
        (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(ConfigError, match="model"):
        load_tokenizer(folder, TokenizerConfig())


def test_placement_follows_the_cores_given() -> None:
    assert [encode_threads(0, cores) for cores in (1, 2, 8, 64)] == [1, 2, 8, 8]
    assert encode_threads(3, 64) == 3
