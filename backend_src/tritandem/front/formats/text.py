"""The text of one answer as it arrives, for grammars that read it: what may be passed on, what must wait. Pure.

A grammar is a generator that yields where it needs more text. What it makes of a text never depends on how the text
was cut: a decision waits until the characters that decide it are there.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Pass = Callable[[str], None]


class Said(NamedTuple):
    text: str


class Thought(NamedTuple):
    text: str


class Call(NamedTuple):
    """A call begins; its arguments follow."""

    name: str


class Arguments(NamedTuple):
    """More of the JSON text of the latest call's arguments."""

    text: str


Part = Said | Thought | Call | Arguments


class Text:
    """`left`: characters that came and are not read yet. `ended`: no more will come."""

    def __init__(self) -> None:
        self.left, self.ended = "", False
        self.parts: list[Part] = []
        self.calls = 0
        self._space = self._thought_space = ""  # at the end of what was said so far: dropped before a call

    # -- what it means ---------------------------------------------------------------------------

    def say(self, text: str) -> None:
        kept = (text := self._space + text).rstrip()
        self._space = text[len(kept) :]
        if kept:
            self.parts.append(Said(kept))

    def think(self, text: str) -> None:
        kept = (text := self._thought_space + text).rstrip()
        self._thought_space = text[len(kept) :]
        if kept:
            self.parts.append(Thought(kept))

    def call(self, name: str) -> None:
        self._space = ""
        self.calls += 1
        self.parts.append(Call(name))

    def arguments(self, text: str) -> None:
        if text:
            self.parts.append(Arguments(text))

    def close(self) -> None:
        """The answer has ended: an answer without calls is what the model wrote, to the last space."""
        if not self.calls and self._space:
            self.parts.append(Said(self._space))
        self._space = ""

    # -- reading ---------------------------------------------------------------------------------

    def put_back(self, text: str) -> None:
        self.left = text + self.left

    def until(self, marks: Iterable[str], onto: Pass) -> Reading[str]:
        """What stands before the first of the marks goes on as it comes. The mark, taken; "" at the end of the text.

        No mark may stand inside another.
        """
        marks = tuple(marks)
        while True:
            found = min((at, mark) for mark in (*marks, "") if (at := self._find(mark)) >= 0)
            if found[1]:
                onto(self.left[: found[0]])
                self.left = self.left[found[0] + len(found[1]) :]
                return found[1]
            keep = 0 if self.ended else max(_beginning(self.left, mark) for mark in marks)
            passed, self.left = self.left[: len(self.left) - keep], self.left[len(self.left) - keep :]
            onto(passed)
            if self.ended:
                return ""
            yield

    def rest(self, onto: Pass) -> Reading[None]:
        while True:
            onto(self.left)
            self.left = ""
            if self.ended:
                return
            yield

    def peek(self) -> Reading[str]:
        """The next character, not taken; "" at the end of the text."""
        while not self.left and not self.ended:
            yield
        return self.left[:1]

    def blank(self, onto: Pass) -> Reading[None]:
        """White space goes on, if there is any."""
        while True:
            rest = self.left.lstrip()
            onto(self.left[: len(self.left) - len(rest)])
            self.left = rest
            if rest or self.ended:
                return
            yield

    def literal(self, *options: str) -> Reading[str]:
        """The one that comes next, taken; "" if none does. None may begin another."""
        while True:
            for option in options:
                if self.left.startswith(option):
                    self.left = self.left[len(option) :]
                    return option
            if self.ended or not any(option.startswith(self.left) for option in options):
                return ""
            yield

    def mark(self, mark: str) -> Reading[None]:
        """What closes something already told: taken if it comes next, and what is left of it where the answer is cut
        off inside it."""
        if not (yield from self.literal(mark)) and self.ended and mark.startswith(self.left):
            self.left = ""

    def value(self, onto: Pass) -> Reading[None]:
        """One JSON value goes on as it comes, to its closing bracket or quote; a bare one to what cannot be of it."""
        depth, quoted, escaped = 0, False, False
        while True:
            for at, char in enumerate(self.left):
                closed = False
                if escaped:
                    escaped = False
                elif quoted:
                    escaped = char == "\\"
                    quoted = char != '"'
                    closed = not quoted and not depth
                elif char == '"':
                    quoted = True
                elif char in "{[":
                    depth += 1
                elif not depth and (char in "}],:<;" or char.isspace()):
                    onto(self.left[:at])
                    self.left = self.left[at:]
                    return
                elif char in "}]":
                    depth -= 1
                    closed = not depth
                if closed:
                    onto(self.left[: at + 1])
                    self.left = self.left[at + 1 :]
                    return
            onto(self.left)
            self.left = ""
            if self.ended:
                return
            yield

    def _find(self, mark: str) -> int:
        return self.left.find(mark) if mark else len(self.left)


def drop(text: str) -> None:
    """Nothing that anybody is told."""


def _beginning(text: str, mark: str) -> int:
    """How many characters at the end of the text may be the beginning of the mark."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
