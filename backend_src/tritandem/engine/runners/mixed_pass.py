"""Prefill chunks and decode rows in one pass over the weights, captured as CUDA graphs by size.

A step that carries both would otherwise read the weights twice, and a short prefill would cost the host
hundreds of launches: of a small model the device is done long before the last of them. Owns the sizes that are
captured, the fixed input buffers that graphs read and the logits that they write. Mixing prefill with decode
follows Sarathi-Serve (Agrawal et al. 2024). Core thread, current stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from ..model.device_forward import DeviceForward
from ..rows.inputs import PassInputs, spread
from ..rows.state import SlotState
from ..rows.words import StepWords
from ..step import GREEDY, PrefillChunk, SamplingFeatures
from .decode_step import DecodeStep
from .graphs import DecodeGraphs, GraphCache
from .pass_size import PassSize, cheapest, efficient_tokens, row_buckets, rows_of_pass, token_buckets


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
        self.efficient_tokens: tuple[tuple[int, int], ...] = ()  # by rows; (): not measured
        largest = PassSize(max_rows, max_tokens)
        device = state.words.device
        self._buffers = PassInputs.empty(largest.tokens, largest.chunks, device)
        total = largest.rows + largest.chunks
        self._choosing = torch.empty(total, dtype=torch.int64, device=device)  # the slots behind the logits
        self._nobody = torch.full_like(self._choosing, state.pad_slot)
        # Of the latest pass that did not choose itself.
        self.logits = torch.empty((total, state.vocab_size), dtype=dtype, device=device)

    @property
    def token_sizes(self) -> tuple[int, ...]:
        return tuple(self._tokens)

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

    def run(self, size: PassSize, firsts: int, features: SamplingFeatures) -> None:
        """Enqueue the pass over the step's decode rows and the chunks in `inputs(size)`, of which `firsts` are their
        prompt's last. It fills one record of `rows_of_pass` rows: size.rows decode rows, then first tokens.

        Greedy tokens are chosen inside the pass (`pick` is set in its inputs), others by a graph of their own.
        """
        self._cache.run(size, partial(self._enqueue, size))
        total = rows_of_pass(size, firsts, features)
        if features != GREEDY and total:
            self._cache.run((size.rows, total, features), partial(self._choose, size.rows, total, features))

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
