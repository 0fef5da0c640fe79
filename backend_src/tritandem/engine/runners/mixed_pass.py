"""Prefill chunks and decode rows in one pass over the weights, captured as CUDA graphs by size.

A step that carries both would otherwise read the weights twice, and a short prefill would cost the host
hundreds of launches: of a small model the device is done long before the last of them. Owns the sizes that are
captured, the fixed input buffers that graphs read and the logits that they write. Mixing prefill with decode
follows Sarathi-Serve (Agrawal et al. 2024). Core thread, current stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..model.device_forward import DeviceForward
from ..rows.pack import PassInputs, StepWords, spread
from ..rows.state import SlotState
from ..step import PrefillChunk, SamplingFeatures
from .decode_step import GREEDY, DecodeStep
from .graphs import DecodeGraphs, GraphCache

MAX_CHUNKS = 64  # sequences whose chunks travel in one pass
MANY_ROWS = 64  # what `efficient_tokens` is measured beside
EFFICIENT_FROM = 128  # smaller chunks would keep prompts waiting for more steps than they save
_FIRSTS = (0, 4, 16, MAX_CHUNKS)  # first tokens that a graph which samples them has room for
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


def row_buckets(max_rows: int) -> list[int]:
    """Decode rows of a pass. Coarse: beside a chunk, rows cost little, and each bucket is a row of graphs."""
    return [0, *(size for size in _ROW_BUCKETS if size < max_rows), max_rows]


def token_buckets(max_tokens: int) -> list[int]:
    """Prompt tokens of a pass: steps of an eighth or less beyond the small ones, the last is `max_tokens`."""
    sizes: list[int] = []
    for limit, step in _TOKEN_STEPS:
        sizes += range((sizes[-1] if sizes else 0) + step, limit + 1, step)
    return [size for size in sizes if size < max_tokens] + [max_tokens]


def cheapest(costs: Mapping[PassSize, float], decode_ms: Callable[[int], float]) -> dict[PassSize, PassSize]:
    """For each size the one to run instead: more padding where a vendor's product of that height happens to be
    slow (448 rows of an 8B model took 17 ms on an H200 and 512 took 14), or no decode rows where a pass for each
    part is faster. `costs` and `decode_ms` (of a decode step over so many rows) in the same unit. Pure.
    """
    choices = {}
    for size in costs:
        fits = [other for other in costs if other.rows == size.rows and other.tokens >= size.tokens]
        best = min(fits, key=costs.__getitem__)
        apart = [other for other in costs if other.rows == 0 and other.tokens >= size.tokens]
        if size.rows and apart:
            alone = min(apart, key=costs.__getitem__)
            if costs[alone] + decode_ms(size.rows) < costs[best]:
                best = alone
        choices[size] = best
    return choices


def efficient_tokens(costs: Mapping[PassSize, float], decode_ms: Callable[[int], float]) -> int:
    """The chunk, of EFFICIENT_FROM tokens or more, that adds least to a step over MANY_ROWS rows for each of its
    tokens: while the products still wait for the weights, prompt tokens ride along. 0 where that was not measured.
    Arguments as in `cheapest`. Pure.
    """
    rows = [size.rows for size in costs if size.rows <= MANY_ROWS]
    beside = [size for size in costs if size.rows == max(rows, default=0) and size.tokens >= EFFICIENT_FROM]
    if not beside:
        return 0
    return min(beside, key=lambda size: (costs[size] - decode_ms(size.rows)) / size.tokens).tokens


class MixedPasses:
    """Passes of up to `max_tokens` prompt tokens beside up to `max_rows` decode rows of a fused model."""

    def __init__(
        self,
        state: SlotState,
        block_tokens: int,
        forward: DeviceForward,
        step: DecodeStep,
        cache: GraphCache,
        max_rows: int,
        max_tokens: int,
        dtype: torch.dtype,
    ) -> None:
        self._state, self._block_tokens, self._forward = state, block_tokens, forward
        self._step, self._cache = step, cache
        self._rows, self._tokens = row_buckets(max_rows), token_buckets(max_tokens)
        self._choices: dict[PassSize, PassSize] = {}  # the graph to take where this one is the smallest that fits
        self._inputs: dict[PassSize, PassInputs] = {}  # views of the buffers
        self.efficient_tokens = 0  # chunk that costs least a token beside many rows; 0: not measured
        largest = PassSize(max_rows, max_tokens)
        device = state.words.device
        self._buffers = PassInputs.empty(largest.tokens, largest.chunks, device)
        total = largest.rows + largest.chunks
        self._choosing = torch.empty(total, dtype=torch.int64, device=device)  # the slots behind the logits
        self._nobody = torch.full_like(self._choosing, state.pad_slot)
        # Of the latest pass that did not choose itself.
        self.logits = torch.empty((total, state.vocab_size), dtype=dtype, device=device)

    def size(self, rows: int, chunks: Sequence[PrefillChunk]) -> PassSize | None:
        """The pass that carries these chunks; `rows` of 0 in it: the decode rows are faster in a step of their own.

        None: too much for one pass, or nothing is captured for this model.
        """
        if not self._choices:
            return None
        tokens = sum(len(chunk.ids) for chunk in chunks)
        row_bucket = self._rows[bisect_left(self._rows, rows)]
        for bucket in self._tokens[bisect_left(self._tokens, tokens) :]:
            size = PassSize(row_bucket, bucket)
            if len(chunks) <= size.chunks and size in self._choices:
                return self._choices[size]
        return None

    def capture_lazily(self) -> None:
        """Every size may be used from now on and is captured then; which of them are worth it is not known."""
        if self._cache.enabled and self._forward.fused:
            self._choices = {size: size for size in self._sizes()}

    def warm_up(self, decode: DecodeGraphs, on_progress: Callable[[str], None]) -> None:
        """Capture every size, the largest first so that the others reuse its memory, and measure which are worth it.

        Counts records up: their numbering starts after this.
        """
        if not (self._cache.enabled and self._forward.fused):
            return
        costs: dict[PassSize, float] = {}
        sizes = self._sizes()
        for done, size in enumerate(sizes, start=1):
            inputs = self.inputs(size)
            spread(inputs.ints, StepWords([]), self._state, self._step.rows, inputs, pick=True)
            self._cache.capture(size, partial(self._enqueue, size))
            cost = self._cache.device_ms(size)
            if cost is not None:
                costs[size] = cost
            if done % len(self._tokens) == 0:
                on_progress(f"prefill graphs: {done} of {len(sizes)}")
        self._choices = cheapest(costs, decode.idle_ms)
        self.efficient_tokens = efficient_tokens(costs, decode.idle_ms)

    def inputs(self, size: PassSize) -> PassInputs:
        """Where graphs of this size read the step's chunks."""
        if size not in self._inputs:
            self._inputs[size] = PassInputs.views(size.tokens, size.chunks, self._buffers.longs, self._buffers.ints)
        return self._inputs[size]

    def run(self, size: PassSize, firsts: int, features: SamplingFeatures) -> int:
        """Enqueue the pass over the step's decode rows and the chunks in `inputs(size)`, of which `firsts` are their
        prompt's last. It fills one record: size.rows decode rows, then first tokens; returns how many rows it holds.

        Greedy tokens are chosen inside the pass (`pick` is set in its inputs), others by a graph of their own.
        """
        self._cache.run(size, partial(self._enqueue, size))
        if features == GREEDY:
            return size.rows + size.chunks
        places = next((places for places in _FIRSTS if places >= firsts), MAX_CHUNKS)
        total = size.rows + min(places, size.chunks)
        if total:
            self._cache.run((size.rows, total, features), partial(self._choose, size.rows, total, features))
        return total

    def _enqueue(self, size: PassSize, rehearsal: bool) -> None:
        inputs, total = self.inputs(size), size.rows + size.chunks
        if rehearsal:
            inputs = replace(inputs, last_slots=self._nobody[: size.chunks])
        choosing = self._choosing[:total]
        fed, rows = self._step.begin_pass(inputs, size.rows, choosing, self._block_tokens, rehearsal)
        logits = self._forward.mixed(
            self._state, self._block_tokens, fed.ids, fed.positions, fed.logit_rows, fed.chunks, rows, fed.row_lens
        )
        self._step.choose_if(inputs.pick, logits, self.logits, choosing, size.rows, rehearsal)

    def _choose(self, rows: int, total: int, features: SamplingFeatures, rehearsal: bool) -> None:
        slots = (self._nobody if rehearsal else self._choosing)[:total]
        self._step.choose(self.logits[:total], slots, features, rows, rehearsal)

    def _sizes(self) -> list[PassSize]:
        """The largest first."""
        return [PassSize(rows, tokens) for rows in reversed(self._rows) for tokens in reversed(self._tokens)]
