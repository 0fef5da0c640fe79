"""Small expressions as automata over bytes, for answers whose structure a device can follow by itself.

A subset of regular expressions: literals, classes, groups, alternatives, repetitions. Whatever is not in it, or becomes
too large, has no automaton here. Construction after Thompson (1968); subsets of states after Rabin and Scott (1959).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...contracts.arrays import Int32Array

MAX_STATES = 255
MAX_PARTS = 4096  # of the automaton before its subsets
MAX_NODES = 4 * MAX_PARTS  # that it is built of
MAX_MOVES = 1 << 20  # of parts by bytes, looked at for its subsets: a third of a second
DEAD = -1
_TOP = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_LITERAL_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v"}

Ranges = list[tuple[int, int]]  # of code points, both ends included
# ("set", ranges) | ("cat", nodes) | ("alt", nodes) | ("rep", node, least, most or None)
Node = tuple[Any, ...]


class TooMuch(Exception):
    """Not in the subset, or too large."""


@dataclass(frozen=True, slots=True)
class ByteAutomaton:
    """State 0 is the first; every state can still reach an accepting one."""

    moves: Int32Array  # [states, 256] the next state, or DEAD
    accepting: np.ndarray[tuple[int], np.dtype[np.bool_]]  # [states]


def of_texts(texts: list[str]) -> Node:
    return ("alt", [("cat", [("set", [(ord(char), ord(char))]) for char in text]) for text in texts])


def parse(pattern: str) -> Node:
    """Raises TooMuch."""
    parser = _Parser(pattern)
    node = parser.alternatives()
    if parser.at < len(pattern):
        raise TooMuch(pattern)
    return node


def automaton(node: Node) -> ByteAutomaton:
    """Raises TooMuch."""
    nfa = _Nfa()
    last = nfa.build(node, 0)
    return _determined(nfa, last)


@dataclass(slots=True)
class _Parser:
    text: str
    at: int = 0

    def alternatives(self) -> Node:
        found = [self._sequence()]
        while self._take("|"):
            found.append(self._sequence())
        return found[0] if len(found) == 1 else ("alt", found)

    def _sequence(self) -> Node:
        parts = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._repeated(self._atom()))
        return ("cat", parts)

    def _take(self, token: str) -> bool:
        found = self.text.startswith(token, self.at)
        self.at += len(token) if found else 0
        return found

    def _next(self) -> str:
        if self.at >= len(self.text):
            raise TooMuch("it ends too early")
        self.at += 1
        return self.text[self.at - 1]

    def _atom(self) -> Node:
        char = self._next()
        if char == "(":
            if self._take("?") and not self._take(":"):
                raise TooMuch("a group with flags")
            inner = self.alternatives()
            if not self._take(")"):
                raise TooMuch("an open group")
            return inner
        if char == "[":
            return ("set", self._class())
        if char == ".":
            return ("set", _complement([(10, 10)]))
        if char == "\\":
            char = self._escaped()
        elif char in "^$*+?{}":
            raise TooMuch(char)
        return ("set", [(ord(char), ord(char))])

    def _escaped(self) -> str:
        char = self._next()
        if char.isalnum() and char not in _LITERAL_ESCAPES:
            raise TooMuch(f"\\{char}")
        return _LITERAL_ESCAPES.get(char, char)

    def _class(self) -> Ranges:
        negated, found = self._take("^"), []
        while not self._take("]"):
            low = self._member()
            high = low
            if self.text.startswith("-", self.at) and not self.text.startswith("-]", self.at):
                self.at += 1
                high = self._member()
            if high < low:
                raise TooMuch("a range backwards")
            found.append((ord(low), ord(high)))
        return _complement(found) if negated else found

    def _member(self) -> str:
        char = self._next()
        if char == "\\":
            return self._escaped()
        if char in "[&~":  # a class in a class, or an operation on classes, in some dialects
            raise TooMuch("a class of classes")
        return char

    def _repeated(self, node: Node) -> Node:
        bounds: tuple[int, int | None] | None = None
        if self._take("*"):
            bounds = (0, None)
        elif self._take("+"):
            bounds = (1, None)
        elif self._take("?"):
            bounds = (0, 1)
        elif self._take("{"):
            inner, closed, rest = self.text[self.at :].partition("}")
            low, comma, high = inner.partition(",")
            if not (closed and low.isdecimal() and (high.isdecimal() or not high)):
                raise TooMuch("braces")
            self.at = len(self.text) - len(rest)
            bounds = (int(low), int(high) if high else None if comma else int(low))
        if bounds is None:
            return node
        if self.at < len(self.text) and self.text[self.at] in "*+?{":
            raise TooMuch("a repetition of a repetition")
        return ("rep", node, *bounds)


@dataclass(slots=True)
class _Nfa:
    """Parts with arrows for ranges of bytes, and free ones."""

    arrows: list[list[tuple[int, int, int]]] = field(default_factory=lambda: [[]])  # first byte, last byte, to
    free: list[list[int]] = field(default_factory=lambda: [[]])
    built: int = 0  # nodes, those of nothing too: repetitions of those make no parts

    def new(self) -> int:
        if len(self.arrows) >= MAX_PARTS:
            raise TooMuch("too many parts")
        self.arrows.append([])
        self.free.append([])
        return len(self.arrows) - 1

    def build(self, node: Node, begin: int) -> int:
        """Add what `node` matches behind part `begin`; the part behind it."""
        self.built += 1
        if self.built > MAX_NODES:
            raise TooMuch("too many nodes")
        kind = node[0]
        if kind == "cat":
            for part in node[1]:
                begin = self.build(part, begin)
            return begin
        end = self.new()
        if kind == "alt":
            for part in node[1]:
                first = self.new()
                self.free[begin].append(first)
                self.free[self.build(part, first)].append(end)
        elif kind == "set":
            for sequence in _byte_ranges(node[1]):
                at = begin
                for low, high in sequence[:-1]:
                    following = self.new()
                    self.arrows[at].append((low, high, following))
                    at = following
                low, high = sequence[-1]
                self.arrows[at].append((low, high, end))
        else:
            self._repeat(node[1], node[2], node[3], begin, end)
        return end

    def _repeat(self, node: Node, least: int, most: int | None, begin: int, end: int) -> None:
        at = begin
        for _ in range(least):
            at = self.build(node, at)
        if most is None:
            loop = self.new()
            self.free[at].append(loop)
            self.free[self.build(node, loop)].append(loop)
            at = loop
        else:
            for _ in range(most - least):
                self.free[at].append(end)
                at = self.build(node, at)
        self.free[at].append(end)


def _determined(nfa: _Nfa, last: int) -> ByteAutomaton:
    """Sets of parts are whole numbers, a bit a part."""
    closures: dict[int, int] = {}

    def closed(parts: int) -> int:
        if parts not in closures:
            found, left = parts, list(_bits(parts))
            while left:
                for to in nfa.free[left.pop()]:
                    if not found >> to & 1:
                        found |= 1 << to
                        left.append(to)
            closures[parts] = found
        return closures[parts]

    numbers = {closed(1): 0}
    rows: list[list[int]] = []
    looked_at = 0
    for state in (order := list(numbers)):
        reached = [0] * 256
        for part in _bits(state):
            for low, high, to in nfa.arrows[part]:
                looked_at += high - low + 1
                if looked_at > MAX_MOVES:
                    raise TooMuch("too many moves")
                for byte in range(low, high + 1):
                    reached[byte] |= 1 << to
        row = []
        for parts in reached:
            to = closed(parts) if parts else 0
            if to and to not in numbers:
                if len(numbers) >= MAX_STATES:
                    raise TooMuch("too many states")
                numbers[to] = len(numbers)
                order.append(to)
            row.append(numbers[to] if to else DEAD)
        rows.append(row)
    moves = np.array(rows, np.int32)
    accepting = np.array([bool(state >> last & 1) for state in order])
    return ByteAutomaton(_without_dead_ends(moves, accepting), accepting)


def _without_dead_ends(moves: Int32Array, accepting: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Int32Array:
    """No move into a state that reaches no accepting one. States that are reached no more stay, at no harm."""
    alive = accepting.copy()
    while True:
        reaching = alive | (alive[moves] & (moves != DEAD)).any(axis=1)
        if (reaching == alive).all():
            return np.where(alive[moves], moves, DEAD).astype(np.int32)
        alive = reaching


def _bits(number: int) -> Iterator[int]:
    while number:
        low = number & -number
        yield low.bit_length() - 1
        number ^= low


def _complement(ranges: Ranges) -> Ranges:
    found, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            found.append((at, low - 1))
        at = max(at, high + 1)
    return [*found, (at, _TOP)] if at <= _TOP else found


def _byte_ranges(ranges: Ranges) -> Iterator[list[tuple[int, int]]]:
    """Sequences of ranges of bytes that together spell these code points in UTF-8."""
    for low, high in ranges:
        for first, last in ((low, min(high, _SURROGATES[0] - 1)), (max(low, _SURROGATES[1] + 1), high)):
            if first <= last:
                yield from _split(first, last)


def _split(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    for limit in (0x7F, 0x7FF, 0xFFFF):
        if low <= limit < high:
            yield from _split(low, limit)
            yield from _split(limit + 1, high)
            return
    for shift in (6, 12, 18):
        tail = (1 << shift) - 1
        if high > 0x7F and low & ~tail != high & ~tail:
            if low & tail:
                yield from _split(low, low | tail)
                yield from _split((low | tail) + 1, high)
                return
            if high & tail != tail:
                yield from _split(low, (high & ~tail) - 1)
                yield from _split(high & ~tail, high)
                return
    yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))
