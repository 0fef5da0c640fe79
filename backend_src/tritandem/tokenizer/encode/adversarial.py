"""Texts made to break tokenizers: what engines and cuts have been seen to get wrong, and what they might.

Owns the generators that the start-up check, the tests and the fuzzer share. Deterministic for a given `Random`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

DIGIT_ZEROS = (0x30, 0x660, 0x6F0, 0x7C0, 0x966, 0x9E6, 0xE50, 0xF20, 0x1040, 0x17E0, 0x1810, 0xFF10, 0x1D7CE, 0x1E950)
SPACES = " \t\n\r\x0b\x0c\x85\xa0\u1680\u180e\u2003\u2028\u2029\u202f\u3000\ufeff\u200b\u200d\u2060"
APOSTROPHES = ("'s", "'S", "'t", "'RE", "'ve", "'ll", "'D", "'m", "’s", "'\u017f", "''", "' s", "'x", "s'", "n't")
MARKS = (
    "\u0301\u0308\u0327\u0345\u0483\u0591\u064b\u0651\u093c\u094d\u0e31\u0f71\u1dc0\u20d0\u3099\u309a\ufe0f\U0001f3fd"
)
LETTERS = "aZéßñİıŉǆǅΣςσЖжאعहกლ가힣ꙮﬁ\u017f\u212a\u1e9e\U00010400\U0001d49c"
HAN_AND_KANA = "一丁中国語龥漢字的是ぁあんゝァンー々㐀\U00020000"
HAN_STOPS = "，。、；：！？「」（）…—"
SYMBOLS = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~§©°±×÷€₩→∀■☃♥😀👍🏽👩\u200d💻🇩🇪\U0001f9d1\u200d🚀'
CUT_NEIGHBOURS = "aZk s  \n\n09語あ、。！'./-\u0301\u3099\u017f\t\r\u3000é"  # dense in places where a text may be cut
ODD = "\x00\x01\x1f\x7f\x80\x9f\u00ad\u0378\u200e\u202e\ue000\ufffd\ufffe\uffff\U000e0001\U0010ffff"
WORD_TEXT = """
the quick brown fox jumps over lazy dogs and then some more words that nobody needs
def return import self lambda class None True https www example com README HTTPServer camelCase snake_case
Straße naïve café Ελλάδα Россия שלום مرحبا नमस्ते สวัสดี 한국어 日本語 中文文本 1234567890 3.14159 x86_64
"""
WORDS = WORD_TEXT.split()


def short_texts(rng: random.Random, count: int, added: Sequence[str] = ()) -> Iterator[str]:
    """`count` texts of up to some 200 characters, each mixing a few kinds; `added` tokens turn up in them."""
    for _ in range(count):
        yield "".join(_fragment(rng, added) for _ in range(rng.randint(1, 14)))


def long_texts(rng: random.Random, run_chars: int) -> Iterator[str]:
    """Thirteen texts around runs of one kind, the last two of ordinary words."""
    yield "a" * run_chars
    yield " " * run_chars
    yield "\n" * run_chars + "x"
    yield "-" * run_chars
    yield "".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(run_chars))
    yield "".join(rng.choice("ABCDwxyz0189+/") for _ in range(run_chars))
    yield "".join(chr(rng.choice(DIGIT_ZEROS) + rng.randrange(10)) for _ in range(run_chars))
    yield "".join(chr(0xFF10 + rng.randrange(10)) for _ in range(run_chars))
    yield "".join(chr(0x966 + rng.randrange(10)) for _ in range(run_chars))
    yield "e" + "".join(rng.choice(MARKS) for _ in range(run_chars))
    yield "".join(rng.choice(HAN_AND_KANA + HAN_STOPS) for _ in range(run_chars))
    yield " ".join(rng.choice(WORDS) for _ in range(run_chars // 5))
    yield "\n".join(" ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 12))) for _ in range(run_chars // 30))


def unicode_text(rng: random.Random, chars: int) -> str:
    """Characters from all of Unicode, surrogates excepted."""
    planes = ((0x20, 0x7F), (0x80, 0x2000), (0x2000, 0xD800), (0xE000, 0x10000), (0x10000, 0x32000), (0x20, 0x110000))
    text = ""
    while len(text) < chars:
        code = rng.randrange(*rng.choice(planes))
        if not 0xD800 <= code < 0xE000:
            text += chr(code)
    return text


def _fragment(rng: random.Random, added: Sequence[str]) -> str:
    kind = rng.randrange(16)
    some = rng.choice((1, 1, 2, 3, 5, 8))
    if kind == 0:
        zero = rng.choice(DIGIT_ZEROS)
        return "".join(chr(zero + rng.randrange(10)) for _ in range(rng.choice((1, 2, 3, 4, 7, 20))))
    if kind == 1:
        return rng.choice(SPACES) * some
    if kind == 2:
        return "".join(rng.choice(SPACES) for _ in range(some))
    if kind == 3:
        return rng.choice(WORDS) + rng.choice(APOSTROPHES)
    if kind == 4:
        return rng.choice(LETTERS) + "".join(rng.choice(MARKS) for _ in range(some))
    if kind == 5:
        return "".join(rng.choice(HAN_AND_KANA) for _ in range(some)) + rng.choice(HAN_STOPS)
    if kind == 6:
        return "".join(rng.choice(SYMBOLS) for _ in range(some)) + rng.choice(("", "\n", "/\n", " "))
    if kind == 7:
        return unicode_text(rng, some)
    if kind == 8:
        return rng.choice(ODD) + rng.choice(LETTERS)
    if kind == 9 and added:
        token = rng.choice(added)
        return rng.choice(("", " ", "\n", "x")) + (token if rng.random() < 0.8 else token[: rng.randint(1, len(token))])
    if kind == 10:
        return rng.choice(("", " ", "  ", "\n")) + rng.choice(WORDS).upper()
    if kind >= 13:
        return "".join(rng.choice(CUT_NEIGHBOURS) for _ in range(some * 3))
    return " ".join(rng.choice(WORDS) for _ in range(some)) + rng.choice(("", " ", "\n", ". ", ",\n"))
