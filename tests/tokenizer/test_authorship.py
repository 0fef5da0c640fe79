"""A text that knows its authors is the text in every operation, and never forgets an author."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tritandem.tokenizer.chats.authorship import (
    CLIENT,
    MODEL,
    Authored,
    TooLarge,
    join,
    joined,
    percent,
    shown,
    spans_of,
    whole,
    writer_of,
)

# Capitals are a client's, small letters the template's: a character tells who must be known as its author.
MOVING: list[Callable[[str], Any]] = [
    lambda s: s,
    lambda s: s.strip(),
    lambda s: s.lstrip(),
    lambda s: s.rstrip(),
    lambda s: s.strip("Aa "),
    lambda s: s.lstrip("\n"),
    lambda s: s.removeprefix("A"),
    lambda s: s.removesuffix("b"),
    lambda s: s.split(),
    lambda s: s.split(None, 1),
    lambda s: s.rsplit(None, 1),
    lambda s: s.split("Ab"),
    lambda s: s.split("b", 2),
    lambda s: s.rsplit("b", 2),
    lambda s: s.splitlines(),
    lambda s: s.splitlines(True),
    lambda s: s.partition("bA"),
    lambda s: s.rpartition("A"),
    lambda s: s.replace("A", "xy"),
    lambda s: s.replace("aB", "", 1),
    lambda s: s.replace("", "-"),
    lambda s: s.replace("", "-", 2),
    lambda s: s.replace("b", "y", 0),
    lambda s: s[3:],
    lambda s: s[:-2],
    lambda s: s[1:1],
    lambda s: list(s),
    lambda s: s[0] if s else "",
    lambda s: s + "tail",
    lambda s: "head" + s,
    lambda s: s * 2,
    lambda s: "-".join([s, "x", s]) if isinstance(s, str) and not isinstance(s, Authored) else join("-", [s, "x", s]),
    lambda s: f"{s}|%s" % 3 if not isinstance(s, Authored) else percent(joined([s, "|%s"]), 3),
]
OTHERS: list[Callable[[str], Any]] = [
    lambda s: s[::-1],
    lambda s: s.upper(),
    lambda s: s.title(),
    lambda s: s.center(40),
    lambda s: s.zfill(30),
    lambda s: s.expandtabs(3),
    lambda s: percent("<%5s>", s),
    lambda s: percent("%s%s", (s, "x")),
    lambda s: percent("%(a)s", {"a": s}),
]
QUESTIONS: list[Callable[[str], Any]] = [len, hash, str.isupper, lambda s: s == "A", lambda s: "Ab" in s]


def some_text(rng: random.Random) -> Authored:
    parts = []
    for _ in range(rng.randrange(6)):
        mine = "".join(rng.choice("ab \n\t\r") for _ in range(rng.randrange(5)))
        theirs = "".join(rng.choice("AB \n\tÄ") for _ in range(rng.randrange(5)))
        parts += [mine, whole(theirs, CLIENT)]
    text = joined(parts)
    return text if isinstance(text, Authored) else Authored(text)


def flat(result: Any) -> list[str]:
    return [result] if isinstance(result, str) else list(result)


def authors(text: str) -> list[int]:
    known = [0] * len(text)
    for begin, end, author in spans_of(text):
        assert 0 <= begin < end <= len(text)
        known[begin:end] = [author] * (end - begin)
    return known


@pytest.mark.parametrize("number", range(len(MOVING)))
def test_what_moves_characters_keeps_their_authors(number: int) -> None:
    rng = random.Random(number)
    for _ in range(300):
        text = some_text(rng)
        made, expected = MOVING[number](text), MOVING[number](str.__str__(text))
        assert made == expected
        for piece in flat(made):
            for char, author in zip(piece, authors(piece), strict=True):
                assert not char.isupper() or author == CLIENT, (text, piece)
                assert not char.islower() or author == 0, (text, piece)


@pytest.mark.parametrize("number", range(len(OTHERS)))
def test_whatever_else_happens_no_character_of_a_client_becomes_the_templates(number: int) -> None:
    rng = random.Random(number)
    for _ in range(300):
        text = some_text(rng)
        made = OTHERS[number](text)
        assert made == OTHERS[number](str.__str__(text))
        if any(char.isupper() for char in text):
            assert writer_of(made) == CLIENT
        if len(made) == len(text) and number != 0:
            assert all(now >= before for now, before in zip(authors(made), authors(text), strict=True))


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_answers_as_the_text_itself(question: Callable[[str], Any]) -> None:
    rng = random.Random(3)
    for _ in range(100):
        text = some_text(rng)
        assert question(text) == question(str.__str__(text))


def test_the_least_trusted_author_of_a_nested_value_counts() -> None:
    ours, models, clients = "x", whole("m", MODEL), whole("c", CLIENT)
    assert writer_of([ours, {"a": 1, "b": None}]) == 0
    assert writer_of({"a": [models]}) == MODEL
    assert writer_of({"a": [models, {clients: 1}]}) == CLIENT
    assert writer_of(object()) == CLIENT
    assert writer_of(shown([models])) == MODEL


def test_growth_is_refused_before_it_takes_memory() -> None:
    long = "x" * (1 << 20)
    nested: Any = [long]
    for _ in range(40):
        nested = [nested, nested]
    for grow in (
        lambda: joined([long] * 1000),
        lambda: Authored(long) * (1 << 30),
        lambda: Authored("a" * 1000).replace("a", long),
        lambda: percent("%99999d", 3),
        lambda: percent("%*d", (99999, 3)),
        lambda: shown(nested),
    ):
        with pytest.raises(TooLarge):
            grow()
