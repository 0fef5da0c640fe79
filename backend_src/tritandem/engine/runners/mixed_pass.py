"""Prefill chunks and decode rows in one pass over the weights, captured as CUDA graphs by size.

A step that carries both would otherwise read the weights twice, and a short prefill would cost the host
hundreds of launches: of a small model the device is done long before the last of them. Owns the fixed input buffers
that graphs read and the logits that they write. Mixing prefill with decode follows Sarathi-Serve (Agrawal et al. 2024).
Core thread, current stream.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from ..model.device_forward import DeviceForward
from ..rows.inputs import PassInputs
from ..rows.state import SlotState
from ..step import GREEDY, SamplingFeatures
from .decode_step import DecodeStep
from .graphs import Enqueue, GraphCache
from .pass_size import ChoiceSize, PassSize, rows_of_pass


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
        self._inputs: dict[PassSize, PassInputs] = {}  # views of the buffers
        largest = PassSize(max_rows, max_tokens)
        device = state.words.device
        self._buffers = PassInputs.empty(largest.tokens, largest.chunks, device)
        total = largest.rows + largest.chunks
        self._choosing = torch.empty(total, dtype=torch.int64, device=device)  # the slots behind the logits
        self._nobody = torch.full_like(self._choosing, state.pad_slot)
        # Of the latest pass that did not choose itself.
        self.logits = torch.empty((total, state.vocab_size), dtype=dtype, device=device)

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
        for part in self.sizes_of(size, firsts, features):
            self._cache.run(part, self.work(part))

    def sizes_of(self, size: PassSize, firsts: int, features: SamplingFeatures) -> list[PassSize | ChoiceSize]:
        """The pass, and the choice behind it where it has one."""
        total = rows_of_pass(size, firsts, features)
        return [size, ChoiceSize(size.rows, total, features)] if features != GREEDY and total else [size]

    def work(self, size: PassSize | ChoiceSize) -> Enqueue:
        """The pass, or the choice of tokens behind one."""
        return partial(self._enqueue, size) if isinstance(size, PassSize) else partial(self._choose, size)

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

    def _choose(self, size: ChoiceSize, rehearsal: bool) -> None:
        slots = (self._nobody if rehearsal else self._choosing)[: size.total]
        self._step.choose(self.logits[: size.total], slots, size.features, size.rows, rehearsal)
