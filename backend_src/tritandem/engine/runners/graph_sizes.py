"""Which graphs there are, which one a step takes and which is captured next: what is needed most exists before the
engine is ready, the rest comes while it is idle, and a larger graph stands in until then.

One book for all devices of a runner, so that they capture in one order. Knows no device. Core thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..step import GREEDY, PrefillChunk, SamplingFeatures
from .pass_size import (
    DecodeSize,
    GraphSize,
    PassSize,
    batch_buckets,
    cheapest,
    efficient_tokens,
    row_buckets,
    token_buckets,
)

# What draws without and with filters is asked for most; the graph with filters serves both.
DRAWN = SamplingFeatures(frozenset({"sampled", "filtered"}))
_PLAIN_DRAWS = (DRAWN, SamplingFeatures(frozenset({"sampled"})))
_FIRST_DRAWN = (1, 8, 64)  # rows
_FIRST_ROWS = 64  # of passes, beside none and the most
_TELL_EVERY_S = 1.0
_SMALL_TOKENS = 512  # a prompt alone that is shorter gets no more padding than it ever will


class GraphSizes:
    """For up to `max_rows` decode rows, beside up to `max_tokens` prompt tokens."""

    def __init__(self, max_rows: int, max_tokens: int, captures: bool) -> None:
        """`max_tokens` 0: no passes are captured. Without `captures` nothing is: steps run eagerly."""
        self.buckets = batch_buckets(max_rows)
        self._captures = captures
        self._rows = row_buckets(max_rows) if captures and max_tokens else []
        self._tokens = token_buckets(max_tokens) if captures and max_tokens else []
        self._there: set[GraphSize] = set()
        self._refused: set[GraphSize] = set()
        self._left: dict[GraphSize, None] = dict.fromkeys(self._all()) if captures else {}
        self._wanted: dict[GraphSize, int] = {}  # how often another one stood in
        self._costs: dict[PassSize, float] = {}  # device time without context, of those that are there
        self._step_ms: dict[int, float] = {}  # the same of a greedy decode step whose rows are all idle, by rows
        self._choices: dict[PassSize, PassSize] | None = {}  # None: to be made anew

    # -- what a step takes -----------------------------------------------------------------------------

    def decode(self, rows: int, features: SamplingFeatures) -> DecodeSize:
        """The step of its own that holds `rows` and serves `features`."""
        at = bisect_left(self.buckets, rows)
        best = DecodeSize(self.buckets[at], features)
        if best in self._there or not self._captures:
            return best
        self._wanted[best] = self._wanted.get(best, 0) + 1
        variants = (features, DRAWN) if features in _PLAIN_DRAWS else (features,)
        sizes = (DecodeSize(bucket, variant) for variant in variants for bucket in self.buckets[at:])
        return next((size for size in sizes if size in self._there), best)

    def carrying(self, rows: int, chunks: Sequence[PrefillChunk]) -> PassSize | None:
        """The pass that carries these chunks; `rows` of 0 in it: the decode rows are faster in a step of their own.

        None: too much for one pass, or nothing is captured for this model.
        """
        if not self._costs:
            return None
        if self._choices is None:
            self._choices = cheapest(self._costs, self.step_ms, self._passes())
        tokens = sum(len(chunk.ids) for chunk in chunks)
        row_bucket = self._rows[bisect_left(self._rows, rows)]
        for bucket in self._tokens[bisect_left(self._tokens, tokens) :]:
            size = PassSize(row_bucket, bucket)
            if len(chunks) <= size.chunks:
                if size in self._left:
                    self._wanted[size] = self._wanted.get(size, 0) + 1
                return self._choices.get(size)
        return None

    def step_ms(self, rows: int) -> float:
        """What the matrix products of a step over `rows` rows take, as measured; attention is not in it."""
        holds = min((size for size in self._step_ms if size >= rows), default=0) if rows else 0
        return self._step_ms[holds] if holds else 0.0

    def efficient_tokens(self) -> tuple[tuple[int, int], ...]:
        """As `pass_size.efficient_tokens`, of what is there."""
        return efficient_tokens(self._costs, self.step_ms)

    def pass_tokens(self) -> tuple[int, ...]:
        """What prefill beside decode rows is padded to, ascending."""
        return tuple(sorted({size.tokens for size in self._costs if size.rows}))

    # -- what is captured ------------------------------------------------------------------------------

    def first(self) -> list[GraphSize]:
        """What must be there before the engine is ready, the largest first: the others reuse its memory."""
        if not self._captures:
            return []
        most = self.buckets[-1]
        drawn = [rows for rows in self.buckets if rows in _FIRST_DRAWN or rows == most]
        steps = [DecodeSize(rows, GREEDY) for rows in self.buckets if _is_power_of_two(rows) or rows == most]
        beside = [*([_FIRST_ROWS] if _FIRST_ROWS in self._rows else []), most]
        alone = [tokens for tokens in self._tokens if tokens <= _SMALL_TOKENS]
        coarse = [tokens for tokens in self._tokens if _is_power_of_two(tokens) or tokens == self._tokens[-1]]
        passes = {*(PassSize(0, tokens) for tokens in (*alone, *coarse))}
        passes |= {PassSize(rows, tokens) for rows in beside for tokens in coarse}
        return [
            *sorted(passes, key=lambda size: -size.rows - size.tokens),
            *(DecodeSize(rows, DRAWN) for rows in reversed(drawn)),
            *reversed(steps),
        ]

    def next(self, missed: Mapping[Any, int]) -> GraphSize | None:
        """What to capture in an idle moment, the most wanted first; None: all is there. `missed`: how often something
        has run eagerly for want of a graph."""
        wanted = {size: count for size, count in {**self._wanted, **missed}.items() if self._may_capture(size)}
        return max(wanted, key=wanted.__getitem__) if wanted else next(iter(self._left), None)

    def captured(self, size: GraphSize, ms: float | None) -> None:
        """There is a graph of `size` now, which takes `ms` where it was measured."""
        self._there.add(size)
        self._settle(size)
        if ms is not None and isinstance(size, PassSize):
            self._costs[size] = ms
            self._choices = None
        elif ms is not None and isinstance(size, DecodeSize):
            self._step_ms[size.rows] = ms
            self._choices = None

    def refused(self, size: GraphSize) -> None:
        """It cannot be captured, and is not tried again."""
        self._refused.add(size)
        self._settle(size)

    def unasked(self) -> list[GraphSize]:
        """What is captured in idle moments even if nothing wants it, in order."""
        return list(self._left)

    def _settle(self, size: GraphSize) -> None:
        self._left.pop(size, None)
        self._wanted.pop(size, None)

    def _may_capture(self, size: GraphSize) -> bool:
        return self._captures and size not in self._there and size not in self._refused

    def _all(self) -> list[GraphSize]:
        return [*(DecodeSize(rows, GREEDY) for rows in self.buckets), *self._passes()]

    def _passes(self) -> list[PassSize]:
        return [PassSize(rows, tokens) for rows in self._rows for tokens in self._tokens]


def capture_first(
    sizes: GraphSizes, capture: Callable[[GraphSize], None], everything: bool, on_progress: Callable[[str], None]
) -> None:
    """Before the engine is ready: what is needed most, or `everything`, with progress and the time left."""
    first = sizes.first()
    todo = [*first, *(size for size in sizes.unasked() if size not in first)] if everything else first
    started = told = time.monotonic()
    for done, size in enumerate(todo):
        now = time.monotonic()
        if done and now - told >= _TELL_EVERY_S:
            left_s = (now - started) / done * (len(todo) - done)
            on_progress(f"graphs: {done} of {len(todo)} captured, about {left_s:.0f} s left")
            told = now
        capture(size)
    if todo:
        later = f"; {len(sizes.unasked())} more are captured in idle moments" if sizes.unasked() else ""
        on_progress(f"{len(todo)} graphs took {time.monotonic() - started:.1f} s{later}")


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
