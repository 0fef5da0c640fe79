"""A remembered beginning gives the ids of the whole text, and memory stays bounded."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from tritandem.config import TokenizerConfig
from tritandem.tokenizer.encode.adversarial import short_texts
from tritandem.tokenizer.encode.counters import Counters
from tritandem.tokenizer.encode.engines import Engines
from tritandem.tokenizer.encode.prefix_cache import ENTRY_OVERHEAD_BYTES, PrefixCache, keys_of, parting_tokens
from tritandem.tokenizer.files.source import AddedToken

from tests.fuzz.claims import Subject

SLOW = replace(TokenizerConfig(), fast=False, piece_chars=200, threads=1)


def turns(rng: random.Random, count: int) -> list[str]:
    """The prompts of a conversation that grows by a turn each time."""
    prompt, prompts = "<|im_start|>system\n" + "Be kind. " * 130 + "<|im_end|>\n", []
    for _ in range(count):
        prompt += f"<|im_start|>user\n{''.join(short_texts(rng, 5))}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(prompt)
        prompt += f"{''.join(short_texts(rng, 5))}<|im_end|>\n"
    return prompts


@pytest.mark.parametrize("it", ["smollm2", "qwen2"], indirect=True)
def test_every_turn_of_a_chat_is_exact_and_hits_after_the_first(it: Subject) -> None:
    engines = Engines(it.source, SLOW, Counters())
    cache, rng = engines._cache, random.Random(1)
    assert cache is not None
    for _ in range(5):
        for number, prompt in enumerate(turns(rng, 8)):
            special = rng.random() < 0.5
            known = cache.find(keys_of(prompt, cache.partings(prompt)))
            found = engines.encode(prompt, special, True)
            assert np.array_equal(found.ids, it.whole.encode(prompt, special))
            assert found.engine == ("prefix_cache" if number else found.engine)
            assert known is None or len(known.ids) < len(found.ids)
            if number:
                assert known is not None
                assert len(known.ids) > 200
    assert engines.present()["cache_hits"] >= 70
    engines.close()


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
def test_the_switch_turns_it_off(it: Subject) -> None:
    engines = Engines(it.source, replace(SLOW, prefix_cache=False), Counters())
    prompt = turns(random.Random(2), 1)[0]
    assert [engines.encode(prompt, True, True).engine for _ in range(2)] == ["pieces", "pieces"]
    engines.close()


def test_bytes_stay_bounded_and_the_least_recently_used_goes_first() -> None:
    rng = random.Random(3)
    cache = PrefixCache(["<E>"], max_bytes=10_000)
    kept: dict[bytes, int] = {}
    for step in range(2000):
        size, key = rng.randint(0, 700), bytes([rng.randrange(60)])
        cache.remember(key, np.arange(size, dtype=np.int32))
        kept[key] = size
        actual = sum(ids.nbytes + ENTRY_OVERHEAD_BYTES for ids in cache._entries.values())
        assert cache._bytes == actual <= 10_000
        found = cache.find([(5, bytes([rng.randrange(60)])), (9, key)])
        assert found is not None
        assert (found.chars, len(found.ids)) == (9, size), step
    assert len(cache._entries) < len(kept)


def test_an_entry_larger_than_the_whole_cache_is_not_kept() -> None:
    cache = PrefixCache(["<E>"], max_bytes=1000)
    cache.remember(b"k", np.zeros(1000, np.int32))
    assert cache.find([(1, b"k")]) is None


def test_keys_differ_where_beginnings_differ() -> None:
    text = "a" * 2000 + "<E>" + "b" * 2000 + "<E>"
    partings = PrefixCache(["<E>"], 1).partings(text)
    assert partings == [2000, 4003]
    keys = dict(keys_of(text, partings))
    assert keys == {end: keys_of(text[:end], [end])[0][1] for end in partings}


@pytest.mark.parametrize(
    ("added", "usable"),
    [
        ([("<a>", "")], ["<a>"]),
        ([("<a>", ""), ("x<a>", "")], []),  # the longer one begins earlier and reaches into it
        ([("<a>", ""), ("y<", "")], []),
        ([("<a>", ""), ("<a>b", "lstrip")], []),
        ([("<a>", ""), ("<a>b", "")], ["<a>"]),
        ([("aba", "")], []),  # overlaps itself
    ],
)
def test_only_tokens_that_nothing_overlaps_part_a_text(added: list[tuple[str, str]], usable: list[str]) -> None:
    tokens = [
        AddedToken(number, content, True, flag == "lstrip", False, False, False)
        for number, (content, flag) in enumerate(added)
    ]
    assert parting_tokens(tokens[:1], tokens, added[0][0]) == usable
