"""Streamed text is transformers' decode of the same ids, and nothing of a stop word ever leaves."""

from __future__ import annotations

import random
import re
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase
from tritandem.contracts.arrays import Int32Array
from tritandem.contracts.fields import MAX_STOP_WORD_CHARS, MAX_STOP_WORDS
from tritandem.tokenizer import TextStreams, TextTokenizer
from tritandem.tokenizer.decode.cleaned_text import last_safe_space
from tritandem.tokenizer.decode.stop_words import StopWords
from tritandem.tokenizer.decode.token_text import WindowText
from tritandem.tokenizer.files.source import read_source

from tests.fuzz.claims import Subject, streamed_text_equals_decode

NO_PROMPT = np.empty(0, np.int32)
TEXT = " Ein 😀 und 👩‍💻, 漢字かな交じり文。 naïve\n\n\tx = 'ok' <|im_end|> ﷽ 🇩🇪 ."


def one(token: int) -> tuple[Int32Array, Int32Array]:
    return np.array([token], np.int32), np.array([1], np.int32)


def streamed(streams: TextStreams, ids: list[int], prompt: Int32Array = NO_PROMPT) -> str:
    state = streams.open(prompt)
    return "".join(streams.push([state], *one(token))[0].text for token in ids) + streams.flush(state)


def answered(
    streams: TextStreams, ids: list[int], words: tuple[str, ...], counts: list[int], min_tokens: int = 0
) -> tuple[str, bool, int]:
    """(emitted text, stopped, tokens used) when the ids arrive in pushes of `counts`."""
    state = streams.open(NO_PROMPT, words, min_tokens)
    text, used, begin = "", 0, 0
    for count in counts:
        tokens = np.array(ids[begin : begin + count], np.int32)
        step = streams.push([state], tokens, np.array([count], np.int32))[0]
        text, used, begin = text + step.text, used + step.tokens_used, begin + count
        if step.stopped:
            return text, True, used
    return text + streams.flush(state), False, used


@pytest.mark.parametrize("it", ["smollm2", "qwen2", "deepseek", "mistral"], indirect=True)
def test_random_pushes_of_natural_text_equal_decode(it: Subject) -> None:
    rng = random.Random(1)
    for special in (False, True):
        ids = it.whole.encode(TEXT, special).tolist()
        for _ in range(50):
            assert streamed_text_equals_decode(it, ids, rng) is None


@pytest.mark.parametrize("it", ["smollm2", "qwen2", "deepseek"], indirect=True)
def test_any_ids_equal_decode_also_broken_utf8(it: Subject) -> None:
    rng = random.Random(2)
    for _ in range(300):
        ids = [rng.randrange(it.source.vocab_size) for _ in range(rng.randint(1, 30))]
        ids += [rng.randrange(200) for _ in range(rng.randint(0, 10))]  # single bytes live among the low ids
        rng.shuffle(ids)
        assert streamed_text_equals_decode(it, ids, rng) is None


@pytest.mark.parametrize("it", ["smollm2", "qwen2", "deepseek", "mistral"], indirect=True)
def test_control_tokens_are_shown_where_they_are_asked_for_and_hidden_beside_them(it: Subject) -> None:
    rng = random.Random(3)
    marks = [token for token in it.source.added_tokens if token.special]
    words = [it.whole.encode(text, False).tolist() for text in ("Hi 🦩 you", " there", "\n\nNow")]
    for _ in range(50):
        said = [rng.choice(marks) if rng.random() < 0.4 else rng.choice(words) for _ in range(rng.randint(1, 8))]
        ids = [token for one in said for token in (one if isinstance(one, list) else [one.id])]
        states = [it.streams.open(NO_PROMPT, (), 0, shown) for shown in (True, False)]
        out = ["", ""]
        while ids:
            some, ids = ids[: (n := rng.randint(1, 3))], ids[n:]
            steps = it.streams.push(states, np.array(some * 2, np.int32), np.array([len(some)] * 2, np.int32))
            out = [text + step.text for text, step in zip(out, steps, strict=True)]
        shown, hidden = (text + it.streams.flush(state) for text, state in zip(out, states, strict=True))
        spelled = re.compile("|".join(re.escape(mark.content) for mark in marks))
        assert spelled.findall(shown) == [one.content for one in said if not isinstance(one, list)]
        assert spelled.sub("", shown).replace(" ", "") == hidden.replace(" ", "")


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
def test_stop_words_are_found_beside_control_tokens_that_are_shown(it: Subject) -> None:
    mark = next(token for token in it.source.added_tokens if token.special)
    ids = [*it.whole.encode("one", False).tolist(), mark.id, *it.whole.encode("two three", False).tolist()]
    state = it.streams.open(NO_PROMPT, (f"{mark.content}two",), 0, True)
    steps = [it.streams.push([state], np.array([one], np.int32), np.array([1], np.int32))[0] for one in ids]
    assert "".join(step.text for step in steps) == "one"
    assert any(step.stopped for step in steps)


@pytest.mark.parametrize("it", ["smollm2", "mistral"], indirect=True)
def test_an_unknown_decoder_is_read_through_a_window(it: Subject) -> None:
    text = WindowText(it.source.new_tokenizer())
    ids = it.whole.encode(TEXT, False).tolist()
    out, state = "", text.open([])
    for token in ids:
        piece, state = text.decode(state, [token])
        out += piece
    assert out + text.finish(state) == it.source.renderer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("it", ["mistral"], indirect=True)
def test_the_first_space_is_dropped_only_at_the_very_beginning(it: Subject) -> None:
    ids = it.whole.encode("Hello world", False).tolist()
    only_bos = np.array([1], np.int32)
    after_text = it.whole.encode("Say:", True)
    assert streamed(it.streams, ids) == "Hello world"
    assert streamed(it.streams, ids, only_bos) == "Hello world"
    assert streamed(it.streams, ids, after_text) == " Hello world"


@pytest.mark.parametrize("it", ["qwen2", "mistral"], indirect=True)
def test_a_character_that_the_prompt_began_is_finished_by_the_answer(it: Subject) -> None:
    ids = it.whole.encode("x 🦩", False)
    for part in range(1, len(ids)):
        whole_text = it.source.renderer.decode(ids.tolist(), skip_special_tokens=True)
        prompt_text = it.source.renderer.decode(ids[:part].tolist(), skip_special_tokens=True)
        expected = whole_text[len(prompt_text.rstrip("\ufffd")) :]
        assert streamed(it.streams, ids[part:].tolist(), ids[:part]) == expected


@pytest.mark.parametrize("it", ["qwen2", "mistral"], indirect=True)
def test_a_cut_off_character_becomes_one_replacement_as_in_decode(it: Subject) -> None:
    ids = it.whole.encode("x 🦩", False).tolist()[:-1]
    assert streamed(it.streams, ids) == it.source.renderer.decode(ids)
    assert streamed(it.streams, ids).endswith("\ufffd")


def test_ids_beyond_the_vocabulary_have_no_text(tokenizer: TextTokenizer) -> None:
    assert streamed(tokenizer.streams(), [504, 10**6, 504]) == streamed(tokenizer.streams(), [504, 504])


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (("wor",), "Hello, "),
        (("o, w",), "Hell"),
        (("😀",), "Hello, world! "),
        (("!", "world!"), "Hello, "),  # complete at the same character: the longer one counts
        (("world! 😀", "orl"), "Hello, w"),  # the one that is complete first ends the text
        (("Hello",), ""),
        (("END", "Hellx", "Bye?"), "Hello, world! 😀 Bye"),
    ],
)
def test_stop_words_cut_exactly_however_the_tokens_arrive(
    tokenizer: TextTokenizer, words: tuple[str, ...], kept: str
) -> None:
    streams = tokenizer.streams()
    ids = tokenizer.encode("Hello, world! 😀 Bye", add_special_tokens=False).ids.tolist()
    singly = answered(streams, ids, words, [1] * len(ids))
    assert singly[:2] == (kept, kept != "Hello, world! 😀 Bye")
    assert answered(streams, ids, words, [len(ids)]) == singly
    rng = random.Random(3)
    for _ in range(30):
        counts: list[int] = []
        while sum(counts) < len(ids):
            counts.append(min(rng.randint(1, 4), len(ids) - sum(counts)))
        assert answered(streams, ids, words, counts) == singly


@pytest.mark.parametrize(
    ("words", "found"),
    [((",", "world"), ","), (("!", "world!"), "world!"), (("world! 😀", "orl"), "orl"), (("END",), ""), ((), "")],
)
def test_the_stop_word_that_ended_a_text_is_known(tokenizer: TextTokenizer, words: tuple[str, ...], found: str) -> None:
    streams = tokenizer.streams()
    ids = tokenizer.encode("Hello, world! 😀 Bye", add_special_tokens=False).ids
    at_once, singly = streams.open(NO_PROMPT, words), streams.open(NO_PROMPT, words)
    streams.push([at_once], ids, np.array([len(ids)], np.int32))
    for token in ids.tolist():
        streams.push([singly], *one(token))
    assert streams.stop_word(at_once) == streams.stop_word(singly) == found


def test_tokens_used_ends_with_the_token_that_completed_the_stop_word(tokenizer: TextTokenizer) -> None:
    streams = tokenizer.streams()
    ids = tokenizer.encode("one two three four", add_special_tokens=False).ids.tolist()
    text, stopped, used = answered(streams, ids, ("two th",), [len(ids)])
    assert (text, stopped) == ("one ", True)
    upto = streamed(streams, ids[:used])
    assert "two th" in upto
    assert "two th" not in streamed(streams, ids[: used - 1])


@pytest.mark.parametrize("min_tokens", range(12))
def test_a_stop_word_ends_nothing_within_the_first_min_tokens(tokenizer: TextTokenizer, min_tokens: int) -> None:
    streams = tokenizer.streams()
    ids = tokenizer.encode("a\nb\nc\nd\n", add_special_tokens=False).ids.tolist()
    before = streamed(streams, ids[:min_tokens])
    later = streamed(streams, ids[min_tokens:]).partition("\n")
    whole = answered(streams, ids, ("\n",), [len(ids)], min_tokens)
    assert whole[:2] == (before + later[0], bool(later[1]))
    assert answered(streams, ids, ("\n",), [1] * len(ids), min_tokens) == whole
    assert answered(streams, ids, ("\n",), [3, len(ids) - 3], min_tokens) == whole


def test_nothing_follows_a_stop(tokenizer: TextTokenizer) -> None:
    streams = tokenizer.streams()
    state = streams.open(NO_PROMPT, (" stop",))
    ids = tokenizer.encode("now stop here", add_special_tokens=False).ids
    assert streams.push([state], ids, np.array([len(ids)], np.int32))[0] == ("now", True, 2)
    assert streams.push([state], *one(504))[0] == ("", True, 0)
    assert streams.flush(state) == ""


def test_sequences_of_one_push_do_not_mix(tokenizer: TextTokenizer) -> None:
    streams = tokenizer.streams()
    texts = ["alpha 😀 beta", "漢字", "", "x" * 50]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    states = [streams.open(NO_PROMPT) for _ in texts]
    steps = streams.push(states, np.concatenate(ids), np.array([len(part) for part in ids], np.int32))
    assert [step.text + streams.flush(state) for step, state in zip(steps, states, strict=True)] == texts


@given(st.text("ab", max_size=14), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_held_back_text_is_exactly_what_may_still_become_a_stop_word(text: str, words: list[str]) -> None:
    stop = StopWords(tuple(words))
    hit = stop.find(text)
    ends = [at for at in range(len(text) + 1) if any(text[:at].endswith(word) for word in words)]
    assert (hit is None) == (not ends)
    if hit:
        assert hit[1] == ends[0]
        assert hit[0] == min(ends[0] - len(word) for word in words if text[: ends[0]].endswith(word))
    else:
        longest = max((size for word in words for size in range(1, len(word)) if text.endswith(word[:size])), default=0)
        assert stop.held_back(text) == longest


def test_the_largest_stop_words_a_client_may_send_cost_no_more_than_they_are_long() -> None:
    words = tuple(f"{i:0{MAX_STOP_WORD_CHARS}}" for i in range(MAX_STOP_WORDS))
    tracemalloc.start()
    stop = StopWords(words)
    kept_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert kept_bytes < sum(map(len, words))  # all their beginnings would be 30 MB
    assert stop.find("x" + words[-1]) == (1, 1 + MAX_STOP_WORD_CHARS)
    assert stop.held_back("1" + words[0][:-1]) == MAX_STOP_WORD_CHARS - 1


@given(text=st.text(" .'nt,sve?", max_size=30), at=st.integers(0, 30))
def test_cleaning_on_both_sides_of_a_safe_space_is_cleaning_the_whole(text: str, at: int) -> None:
    at = last_safe_space(text[:at])
    assert clean(text[:at]) + clean(text[at:]) == clean(text)


def clean(text: str) -> str:
    return PreTrainedTokenizerBase.clean_up_tokenization(None, text)  # it uses nothing of the tokenizer


def test_a_tokenizer_that_cleans_spaces_streams_cleaned_text(smollm2_folder: Path) -> None:
    source = read_source(smollm2_folder)
    streams = TextStreams(replace(source, clean_up_spaces=True))
    text = "It is n't so , he 's sure . Do n't 've ' quotes ' we 're ? yes !"
    ids = source.new_tokenizer().encode(text).ids
    assert streamed(streams, ids) == clean(text) != text


def test_a_batch_costs_at_most_a_few_microseconds_a_token(tokenizer: TextTokenizer) -> None:
    streams = tokenizer.streams()
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 20, add_special_tokens=False).ids
    states = [streams.open(NO_PROMPT) for _ in range(256)]
    counts = np.ones(256, np.int32)
    best_ns = 10**9
    for token in ids[:100]:
        flat = np.full(256, token, np.int32)
        begun = time.perf_counter_ns()
        streams.push(states, flat, counts)
        best_ns = min(best_ns, time.perf_counter_ns() - begun)
    assert best_ns / 256 < 5000  # measured: 0.5 µs; the slack is for a machine that does something else
