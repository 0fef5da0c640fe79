"""Who wrote which characters of a text: strings that remember it through what templates do with strings.

Owns `Authored`, a `str` that equals its text in every comparison, search and length, and knows which of its
characters a client or a model wrote; the rest is the template's own. Pure. Operations that move characters about
(slices, strip, split, replace, join, +) keep the authors exactly; after any other the whole result counts as written
by the least trusted author in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, SupportsIndex

MODEL, CLIENT = 1, 2  # authors; the larger, the less trusted. A template's own characters have none.
MAX_CHARS = 1 << 27  # of one text that is put together here
MAX_NODES = 1 << 20  # of one nested value that is written out
PLAIN_TYPES = (str, int, float, bool, type(None))
PERCENT = re.compile("%[s%]")
ONLY_PLAIN_PERCENT = re.compile("(?:[^%]|%[s%])*")
WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)")

Span = tuple[int, int, int]  # characters [begin, end) and their author; in order, apart from each other


class TooLarge(Exception):
    """A template makes more text than any prompt needs."""


class Authored(str):
    """A text with the authors of its characters. Methods give plain `str` where nothing authored is left."""

    __slots__ = ("_spans",)
    _spans: tuple[Span, ...]

    def __new__(cls, text: str, spans: Iterable[Span] = ()) -> Authored:
        made = super().__new__(cls, text)
        made._spans = tuple(spans)
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: str, /) -> str:
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str, /) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex, /) -> str:
        if len(self) * count.__index__() > MAX_CHARS:
            raise TooLarge(f"a text of more than {MAX_CHARS} characters")
        return joined([self] * count.__index__()) if self else self

    __rmul__ = __mul__

    def __mod__(self, values: Any, /) -> str:
        return percent(self, values)

    def __rmod__(self, text: Any, /) -> str:
        return percent(text, self) if isinstance(text, str) else NotImplemented

    def __iter__(self) -> Iterator[str]:
        return (self._cut(at, at + 1) for at in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice, /) -> str:
        if not isinstance(key, slice):
            at = range(len(self))[key]  # raises IndexError where str does
            return self._cut(at, at + 1)
        begin, end, step = key.indices(len(self))
        return self._cut(begin, end) if step == 1 else whole(str.__getitem__(self, key), writer_of(self))

    def strip(self, chars: str | None = None, /) -> str:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(str.rstrip(self, chars)))

    def lstrip(self, chars: str | None = None, /) -> str:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(self) - len(str.removeprefix(self, prefix)), len(self))

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(str.removesuffix(self, suffix)))

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(str.rsplit(self, sep, maxsplit), sep)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._located(str.partition(self, sep), "")
        return head, middle, tail

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        head, middle, tail = self._located(str.rpartition(self, sep), "")
        return head, middle, tail

    def splitlines(self, keepends: bool = False) -> list[str]:
        with_ends = self._located(str.splitlines(self, True), "")
        if keepends:
            return with_ends
        return [line[: len(shown)] for line, shown in zip(with_ends, str.splitlines(self), strict=True)]

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if old:
            parts = self.split(old, count)
        else:  # before every character and at the end
            at = len(self) + 1 if count.__index__() < 0 else min(count.__index__(), len(self) + 1)
            parts = ["", *self[: max(at - 1, 0)], self[max(at - 1, 0) :]] if at else [self]
        return join(new, parts)

    def join(self, parts: Iterable[str], /) -> str:
        return join(self, list(parts))

    def _located(self, pieces: Sequence[str], sep: str | None) -> list[str]:
        """The pieces of this text that `str` found, in order, with what stands between them, and their authors."""
        located, at = [], 0
        for piece in pieces:
            if sep is None:  # any white space between
                at = self.find(piece, at)
            located.append(self._cut(at, at + len(piece)))
            at += len(piece) + len(sep or "")
        return located

    def _cut(self, begin: int, end: int) -> str:
        text = str.__getitem__(self, slice(begin, end))
        spans = [
            (max(b, begin) - begin, min(e, end) - begin, who) for b, e, who in self._spans if b < end and e > begin
        ]
        return Authored(text, spans) if spans and text else text


def _kept_or_whole(name: str) -> Callable[..., str]:
    """A `str` method that maps characters one by one, or else makes a text of which only the worst author is known."""
    native = getattr(str, name)

    def method(self: Authored, *args: Any, **kwargs: Any) -> str:
        made: str = native(self, *args, **kwargs)
        if not args and len(made) == len(self):  # no character becomes nothing, so each became one
            return Authored(made, self._spans)
        return whole(made, writer_of((self, *args)))

    method.__name__ = name
    return method


for _name in ("capitalize", "casefold", "lower", "swapcase", "title", "upper"):
    setattr(Authored, _name, _kept_or_whole(_name))
for _name in ("center", "expandtabs", "ljust", "rjust", "translate", "zfill"):
    setattr(Authored, _name, _kept_or_whole(_name))


def spans_of(text: str) -> tuple[Span, ...]:
    """The authored characters of any text."""
    return text._spans if isinstance(text, Authored) else ()


def whole(text: str, author: int) -> str:
    """The text, all of it by one author; 0: the template."""
    return Authored(text, [(0, len(text), author)]) if author and text else text


def joined(parts: Sequence[str]) -> str:
    """The parts in a row. Raises TooLarge before it takes memory."""
    if sum(map(len, parts)) > MAX_CHARS:
        raise TooLarge(f"a text of more than {MAX_CHARS} characters")
    text = "".join(parts)
    spans: list[Span] = []
    at = 0
    for part in parts:
        if isinstance(part, Authored):
            for begin, end, author in part._spans:
                if spans and spans[-1][1:] == (at + begin, author):
                    spans[-1] = (spans[-1][0], at + end, author)
                else:
                    spans.append((at + begin, at + end, author))
        at += len(part)
    return Authored(text, spans) if spans else text


def join(separator: str, parts: Sequence[str]) -> str:
    """`str.join`. Raises TooLarge."""
    between = [separator] * max(2 * len(parts) - 1, 0)
    between[::2] = parts
    return joined(between)


def percent(text: str, values: Any) -> str:
    """`text % values`. Raises TooLarge for a width of five digits or from an argument, else what `%` raises."""
    if WIDE_PERCENT.search(text):
        raise TooLarge("a field of a text is too wide")
    arguments = list(values) if isinstance(values, tuple) else [values]
    fields = list(PERCENT.finditer(text)) if ONLY_PLAIN_PERCENT.fullmatch(text) else []
    if isinstance(values, Mapping) or sum(field.group() == "%s" for field in fields) != len(arguments):
        return whole(str.__mod__(text, values), writer_of((text, values)))
    parts, at = [], 0
    for field in fields:
        parts += [text[at : field.start()], shown(arguments.pop(0)) if field.group() == "%s" else "%"]
        at = field.end()
    return joined([*parts, text[at:]])


def shown(value: Any) -> str:
    """`str(value)`, with authors. Raises TooLarge for a nested value that is larger than it looks."""
    if isinstance(value, str):
        return value
    if isinstance(value, PLAIN_TYPES):
        return str(value)
    author = writer_of(value)
    return whole(str(value), author)


def writer_of(value: Any) -> int:
    """The least trusted author of any text inside a nested value; an unknown object counts as a client's.

    Raises TooLarge for more than MAX_NODES values or MAX_CHARS characters, a shared one counted every time.
    """
    author = nodes = chars = 0
    waiting = [value]
    while waiting:
        item = waiting.pop()
        nodes += 1
        if isinstance(item, str):
            chars += len(item)
            author = max((author, *(span[2] for span in spans_of(item))))
        elif isinstance(item, Mapping):
            waiting += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            waiting += item
        elif not isinstance(item, PLAIN_TYPES):
            author = CLIENT
        if nodes + len(waiting) > MAX_NODES or chars > MAX_CHARS:
            raise TooLarge("a nested value is too large to be written out")
    return author
