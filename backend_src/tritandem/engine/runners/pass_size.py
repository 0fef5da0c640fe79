"""The sizes of graphs: decode steps, passes with prefill, choices of tokens behind one; which passes are worth it.

Pure; costs are measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..step import GREEDY, SamplingFeatures

MAX_CHUNKS = 64  # sequences whose chunks travel in one pass
EFFICIENT_FROM = 128  # smaller chunks would keep prompts waiting for more steps than they save
NEARLY = 9 / 8  # a chunk that costs no more than so many times the cheapest a token will do, for shorter steps
FIRSTS = (0, 4, 16, MAX_CHUNKS)  # first tokens that a graph which samples them has room for
_TOKENS_PER_CHUNK = 8  # a pass of few tokens has room for fewer chunks
_ROW_BUCKETS = (8, 32, 64, 128)
_TOKEN_STEPS = ((64, 32), (512, 64), (1024, 128), (2048, 256), (2304, 128))  # up to so many tokens in steps of so many


@dataclass(frozen=True, slots=True)
class PassSize:
    """What one graph holds, padding included."""

    rows: int  # decode rows, first in the pass
    tokens: int  # prompt tokens behind them

    @property
    def chunks(self) -> int:
        return min(MAX_CHUNKS, max(4, self.tokens // _TOKENS_PER_CHUNK))


class DecodeSize(NamedTuple):
    """A decode step of its own."""

    rows: int  # padding included
    features: SamplingFeatures


class ChoiceSize(NamedTuple):
    """The choice of tokens behind a pass that does not choose them itself."""

    rows: int  # decode rows of the pass
    total: int  # rows of its record
    features: SamplingFeatures


GraphSize = DecodeSize | PassSize | ChoiceSize


def batch_buckets(max_rows: int) -> list[int]:
    """Batch sizes that get a graph of their own: fine steps where padding would cost most.

    1, 2, 4, then multiples of 8 to 64, of 16 to 128, of 32 beyond; the last is `max_rows`.
    """
    sizes = {1, 2, 4, *range(8, 65, 8), *range(64, 129, 16), *range(128, max_rows + 1, 32), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


def row_buckets(max_rows: int) -> list[int]:
    """Decode rows of a pass. Coarse: beside a chunk, rows cost little, and each bucket is a row of graphs."""
    return [0, *(size for size in _ROW_BUCKETS if size < max_rows), max_rows]


def token_buckets(max_tokens: int) -> list[int]:
    """Prompt tokens of a pass: steps of an eighth or less beyond the small ones, the last is `max_tokens`."""
    sizes: list[int] = []
    for limit, step in _TOKEN_STEPS:
        sizes += range((sizes[-1] if sizes else 0) + step, limit + 1, step)
    return [size for size in sizes if size < max_tokens] + [max_tokens]


def cheapest(
    costs: Mapping[PassSize, float], decode_ms: Callable[[int], float], sizes: Collection[PassSize] | None = None
) -> dict[PassSize, PassSize]:
    """For each of `sizes` (None: those with a cost) the one to run instead: more padding where a vendor's product of
    that height happens to be slow (448 rows of an 8B model took 17 ms on an H200 and 512 took 14), or where it is not
    captured yet; or no decode rows where a pass for each part is faster. `costs` of those that are captured and
    `decode_ms` (of a decode step over so many rows) in the same unit. Pure.
    """
    choices = {}
    for size in costs if sizes is None else sizes:
        holds = [other for other in costs if other.rows >= size.rows and other.tokens >= size.tokens]
        beside = [other for other in holds if other.rows] if size.rows else holds
        fewest = min((other.rows for other in beside), default=0)
        best = min((other for other in beside if other.rows == fewest), key=costs.__getitem__, default=None)
        if size.rows:
            apart = [other for other in costs if other.rows == 0 and other.tokens >= size.tokens]
            alone = min(apart, key=costs.__getitem__, default=None)
            if alone is not None and (best is None or costs[alone] + decode_ms(size.rows) < costs[best]):
                best = alone
        if best is not None:
            choices[size] = best
    return choices


def efficient_tokens(costs: Mapping[PassSize, float], decode_ms: Callable[[int], float]) -> tuple[tuple[int, int], ...]:
    """(rows, tokens) for each number of rows: the least chunk, of EFFICIENT_FROM tokens or more, whose tokens add about
    as little to a step over so many rows as any chunk's. While products still wait for the weights, a few prompt tokens
    ride along: small chunks are cheapest beside few rows, and beside many their size hardly matters. () where nothing
    was measured. Arguments as in `cheapest`, whose choice is what a size costs. Pure.
    """
    choices = cheapest(costs, decode_ms)
    prices: dict[int, dict[int, float]] = {}
    for size, taken in choices.items():
        if size.rows and size.tokens >= EFFICIENT_FROM:
            apart_ms = 0.0 if taken.rows else decode_ms(size.rows)
            added_ms = max(0.0, costs[taken] + apart_ms - decode_ms(size.rows))  # less: measured beside a neighbour
            prices.setdefault(size.rows, {})[size.tokens] = added_ms / size.tokens
    return tuple(
        (rows, min(tokens for tokens, price in by_tokens.items() if price <= NEARLY * min(by_tokens.values())))
        for rows, by_tokens in sorted(prices.items())
    )


def rows_of_pass(size: PassSize, firsts: int, features: SamplingFeatures) -> int:
    """Rows of the record that a pass of this size fills: its decode rows, then the first tokens of chunks. Greedy ones
    are chosen inside the pass, which has room for every chunk's; others by a graph with room for `firsts` or more."""
    if features == GREEDY:
        return size.rows + size.chunks
    places = next((places for places in FIRSTS if places >= firsts), MAX_CHUNKS)
    return size.rows + min(places, size.chunks)
