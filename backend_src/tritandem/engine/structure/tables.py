"""Small structures as tables over the vocabulary, which a device follows without the host.

A table has a class for each token (tokens of one class lead everywhere to the same state) and for each state and class
the next state. Owns how it is made, checked against the grammar's own matcher, and followed on the host, where what a
device has chosen is looked at again. Knows nothing about sequences or devices.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...contracts.arrays import Int32Array, Int64Array, UInt8Array
from ...contracts.grammars import Grammar, Kind
from ...grammar import Matcher, Vocabulary
from ..step import TABLE_CLASSES, TABLE_STATES
from .expressions import ByteAutomaton, Node, TooMuch, automaton, of_texts, parse
from .spellings import Spellings

Flags = np.ndarray[Any, np.dtype[np.bool_]]
FORBIDDEN = 255  # for a next state
_NOTHING, _END, _FIRST_CLASS = 0, 1, 2  # classes: of tokens that are never allowed, of end tokens, of the others
_SMALL = (Kind.CHOICE, Kind.REGEX, Kind.JSON_SCHEMA)
MAX_TEXT = 4096  # characters of a grammar that may become a table
MAX_CELLS = 4_000_000  # states times tokens


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    classes: UInt8Array  # [32 * mask words] of each token
    moves: UInt8Array  # [TABLE_STATES, TABLE_CLASSES] the next state or FORBIDDEN
    over: Flags  # [states] the structure is complete and nothing may follow
    only: Int32Array  # [states] the one token that may come next; -1: another may, or the end, or none

    @property
    def words(self) -> Int32Array:
        """As a device holds it: classes, then moves."""
        held: Int32Array = np.concatenate((self.classes, self.moves.reshape(-1))).view(np.int32)
        return held

    def mask(self, state: int) -> Int32Array:
        """int32 [mask words] what may come next."""
        allowed = (self.moves[state] != FORBIDDEN)[self.classes]
        packed: Int32Array = np.packbits(allowed, bitorder="little").view(np.int32)
        return packed


@dataclass(slots=True)
class Walker:
    """Where one answer stands in a table; followed like a `Matcher`."""

    table: Table
    vocabulary: Vocabulary
    state: int = 0

    def accept(self, token: int) -> bool:
        following = int(self.table.moves[self.state, self.table.classes[token]])
        if following == FORBIDDEN:
            return False
        self.state = following
        return True

    def is_over(self) -> bool:
        return bool(self.table.over[self.state])

    def mask(self) -> Int32Array:
        return self.table.mask(self.state)

    def forced_tokens(self) -> list[int]:
        """The tokens that must come next; often none."""
        state, run = self.state, list[int]()
        while (token := int(self.table.only[state])) >= 0:  # every state can reach an end: this comes to one
            run.append(token)
            state = int(self.table.moves[state, self.table.classes[token]])
        return run

    def copy(self) -> Walker:
        return Walker(self.table, self.vocabulary, self.state)

    def check(self) -> None:
        """It cannot fail."""


def may_be_small(grammar: Grammar) -> bool:
    """Worth a try."""
    return grammar.kind in _SMALL and grammar.thinking is None and len(grammar.text) <= MAX_TEXT


def table_of(grammar: Grammar, matcher: Matcher, spellings: Spellings) -> Table | None:
    """None: it is no small structure, or not one that is understood here. `matcher` at its beginning."""
    try:
        node = _node_of(grammar)
        return None if node is None else _table(automaton(node), spellings, matcher)
    except TooMuch:
        return None


def _node_of(grammar: Grammar) -> Node | None:
    if grammar.kind is Kind.CHOICE:
        return of_texts(json.loads(grammar.text))
    if grammar.kind is Kind.REGEX:
        return parse(grammar.text)
    if grammar.kind is Kind.JSON_SCHEMA:
        schema = json.loads(grammar.text)
        values = schema.get("enum") if isinstance(schema, dict) else None
        if isinstance(values, list) and set(schema) <= {"enum", "type"} and all(isinstance(v, str) for v in values):
            return of_texts([json.dumps(value, ensure_ascii=False) for value in values])
    return None


def _table(made: ByteAutomaton, spellings: Spellings, matcher: Matcher) -> Table | None:
    """None: the matcher would allow something else. Raises TooMuch."""
    begins, tokens, ends = spellings.walk(made.moves)
    states, vocabulary = len(made.moves), matcher.vocabulary
    touched, places = np.unique(tokens, return_inverse=True)
    if states > TABLE_STATES - 1 or states * len(touched) > MAX_CELLS:
        raise TooMuch("too many cells")
    columns = np.full((states, len(touched)), FORBIDDEN, np.uint8)
    columns[begins, places.reshape(-1)] = ends
    over = made.accepting & (columns == FORBIDDEN).all(axis=1)
    if not _agrees(columns, touched, made.accepting, over, matcher):
        return None
    # Equal columns by a sum of random weights, looked at again: sorting columns themselves takes ten times as long.
    weights = np.random.default_rng(0).integers(1, 2**63, states, np.uint64)
    _, first, of_token = np.unique(weights @ columns.astype(np.uint64), return_index=True, return_inverse=True)
    kinds = columns[:, first]
    if kinds.shape[1] > TABLE_CLASSES - _FIRST_CLASS or not np.array_equal(kinds[:, of_token.reshape(-1)], columns):
        raise TooMuch("too many classes")
    classes = np.full(32 * vocabulary.words, _NOTHING, np.uint8)
    classes[touched] = of_token.reshape(-1) + _FIRST_CLASS
    classes[list(vocabulary.end_ids)] = _END
    moves = np.full((TABLE_STATES, TABLE_CLASSES), FORBIDDEN, np.uint8)
    moves[:states, _END] = np.where(made.accepting, np.arange(states), FORBIDDEN)
    moves[:states, _FIRST_CLASS : _FIRST_CLASS + kinds.shape[1]] = kinds
    allowed = columns != FORBIDDEN
    forced = (allowed.sum(axis=1) == 1) & ~made.accepting
    only = np.where(forced, touched[allowed.argmax(axis=1)], -1).astype(np.int32)
    return Table(classes, moves, over, only)


def _agrees(columns: UInt8Array, tokens: Int64Array, may_end: Flags, over: Flags, matcher: Matcher) -> bool:
    """In each state that can be reached, by one way there: `columns` [states, tokens] allow what the matcher allows.

    Where its text can only go on in one way the matcher allows one token, the tokenizer's own spelling of that way:
    the other spellings are taken out of `columns`.
    """
    row, bits = np.empty(matcher.vocabulary.words, np.int32), np.zeros(32 * matcher.vocabulary.words, np.bool_)
    ends = list(matcher.vocabulary.end_ids)
    seen, left = {0}, [(0, matcher.copy())]
    while left:
        state, at = left.pop()
        at.mask_into(row)
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little").astype(np.bool_)
        bits[:], bits[tokens], bits[ends] = False, columns[state] != FORBIDDEN, may_end[state]
        if not np.array_equal(allowed, bits):
            if allowed.sum() != 1 or not bits[allowed].all():
                return False
            columns[state, ~allowed[tokens]] = FORBIDDEN
        if at.is_over() != over[state]:
            return False
        following, first = np.unique(columns[state], return_index=True)
        for ahead, place in zip(following.tolist(), first.tolist(), strict=True):
            if ahead != FORBIDDEN and ahead not in seen:
                seen.add(ahead)
                other = at.copy()
                if not other.accept(int(tokens[place])):
                    return False
                left.append((ahead, other))
    return True
