"""Long texts wait for short ones between two pieces, never for ever, and stay exact with helpers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tritandem.contracts.arrays import Int32Array
from tritandem.tokenizer.encode import short_first
from tritandem.tokenizer.encode.pieces import PieceEncoder
from tritandem.tokenizer.encode.short_first import ShortFirst

from tests.fuzz.claims import Subject

LONG = "Some words that make a long text.\n" * 400


def encoder(it: Subject, threads: int, gate: ShortFirst | None = None, short_chars: int = 0) -> PieceEncoder:
    assert it.rules is not None
    assert it.affixes is not None
    return PieceEncoder(it.whole, it.rules, it.affixes, 200, threads, short_chars, gate)


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_texts_of_several_callers_do_not_mix(it: Subject, threads: int) -> None:
    pieces = encoder(it, threads)
    texts = [f"{number} and on.\n{LONG}"[: 900 * number] for number in range(12)]
    with ThreadPoolExecutor(4) as callers:
        found = list(callers.map(lambda text: pieces.encode(text, True), texts))
    assert all(np.array_equal(ids, it.whole.encode(text, True)) for ids, text in zip(found, texts, strict=True))
    pieces.close()


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
def test_a_long_text_waits_while_a_shorter_one_is_in_work(it: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_first, "LONGEST_PAUSE_S", 60.0)
    gate = ShortFirst()
    pieces = encoder(it, 2, gate, short_chars=1000)
    with ThreadPoolExecutor(1) as caller:
        with gate.text(1000):
            long_text = caller.submit(pieces.encode, LONG, True)
            short: Int32Array = pieces.encode(LONG[:1000], True)
            assert not long_text.done()
        assert np.array_equal(short, it.whole.encode(LONG[:1000], True))
        assert np.array_equal(long_text.result(60), it.whole.encode(LONG, True))
    pieces.close()


def test_short_texts_without_end_do_not_stop_long_ones() -> None:
    gate = ShortFirst()
    with gate.text(10):
        waiting = threading.Thread(target=gate.pause, args=(11,))
        waiting.start()
        waiting.join(30)
        assert not waiting.is_alive()


def test_texts_of_one_length_and_the_shortest_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_first, "LONGEST_PAUSE_S", 60.0)
    gate = ShortFirst()
    with gate.text(10), gate.text(10):
        gate.pause(10)
        gate.pause(9)
    gate.pause(11)


@pytest.mark.parametrize("it", ["smollm2"], indirect=True)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_piece_that_breaks_fails_the_text_and_the_next_one_is_well(
    it: Subject, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = encoder(it, threads)
    encode = it.whole.encode

    def breaks(text: str, special: bool) -> Int32Array:
        if "BREAK" in text:
            raise MemoryError("no memory")
        return encode(text, special)

    monkeypatch.setattr(it.whole, "encode", breaks)
    with pytest.raises(MemoryError):
        pieces.encode(f"{LONG}BREAK\n{LONG}", True)
    assert np.array_equal(pieces.encode(LONG, True), encode(LONG, True))
    pieces.close()
