"""One CUDA device that executes programs: weights, slot rows, graphs, staging and the report ring.

Owns the order of launches; decides nothing. A step is enqueued, never waited for. Core thread.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from ...config import EngineConfig
from ...contracts.arrays import Int32Array
from ..kernels_ahead import KernelsAhead
from ..model.device_forward import DeviceForward
from ..model.loader import LoadedModel
from ..rows.inputs import PassInputs, spread
from ..rows.state import SlotState
from ..rows.words import StepWords
from ..sampling.prompt_scores import score_chunks, scored_rows
from ..step import GREEDY, STRUCTURED, RunnerSpec, SamplingFeatures, mask_words
from .company import ALONE, Company
from .decode_step import WORDS_PER_ROW, DecodeStep, Report
from .graph_sizes import DRAWN, GraphSizes
from .graphs import DecodeGraphs, Enqueue, GraphCache
from .memory import cuda_spec, measure_and_allocate
from .mixed_pass import MixedPasses
from .pass_size import (
    MAX_CHUNKS,
    ChoiceSize,
    DecodeSize,
    GraphSize,
    PassSize,
    batch_buckets,
    row_buckets,
    token_buckets,
)
from .program import EagerChunks, Program
from .staging import StagingPool, choose_route
from .streams import Streams, cuda_event

RING_DEPTH = 64
Landing = tuple[torch.Tensor, ...]  # in pinned memory, as of `score_tokens`


class Device:
    """Every call goes to the device's compute stream: enter `computing()` first."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        on_progress: Callable[[str], None],
        company: Company = ALONE,
    ) -> None:
        """`company`: the other ranks, where there are some. Raises ConfigError or torch.OutOfMemoryError when weights
        and one sequence do not fit."""
        self.name = torch.device(loaded.model.device)
        torch.cuda.set_device(self.name)
        self.streams = Streams(self.name)
        self.staging = StagingPool(self.name, lambda: cuda_event(blocking=True))
        self._max_rows = config.max_sequences or 256
        self._rehearsed: set[tuple[int, SamplingFeatures]] = set()  # choices of first tokens that run eagerly
        ahead = KernelsAhead(self.name if company is ALONE else torch.device("cpu"))  # one thread at a time walks
        with torch.inference_mode(), torch.cuda.stream(self.streams.compute):
            self._build(loaded, config, ahead, on_progress, company)
            self._compile_ahead(ahead, on_progress)
        ahead.close()

    def _build(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        ahead: KernelsAhead,
        on_progress: Callable[[str], None],
        company: Company,
    ) -> None:
        self.forward = DeviceForward(loaded, config, self._max_rows, on_progress, ahead, company.agree)
        cache = measure_and_allocate(loaded, config, self.forward, self._max_rows, on_progress, company)
        self.forward.use(cache)
        self.spec: RunnerSpec = cuda_spec(loaded, config, cache.keys[0].shape[0], self._max_rows)
        spec = self.spec
        max_blocks = -(-spec.max_context_tokens // spec.block_tokens)
        shape = (spec.num_slots + 1, mask_words(spec.vocab_size))
        masks = company.shared("masks", lambda: self.staging.ring(shape))
        self.state = SlotState.empty(spec.num_slots, max_blocks, spec.vocab_size, self.name, masks)
        record = torch.zeros(1, dtype=torch.int64, device=self.name)
        ring = self.staging.ring((RING_DEPTH, (self._max_rows + MAX_CHUNKS) * WORDS_PER_ROW))
        self.ring = ring.numpy()  # int32 [RING_DEPTH, words], written by the device
        masks_ready = company.shared("masks ready", lambda: self.staging.ring((2,))).view(torch.int64)
        mask_waits = self.staging.ring((2 * RING_DEPTH,)).view(torch.int64)
        self.masks_ready, self.mask_waits = masks_ready.numpy(), mask_waits.numpy()
        self._report = Report(ring, record, masks_ready, mask_waits)
        self._step = DecodeStep(self.state, self._decode_forward, self._report, self._max_rows, MAX_CHUNKS)
        self._nothing = torch.zeros(1, dtype=torch.int32, device=self.name)
        self.captures = GraphCache(
            self.streams.compute, config.cuda_graphs and self.forward.capturable, between_steps=company is ALONE
        )
        self.graphs = DecodeGraphs(self.captures, self._step.enqueue)
        self.mixed = MixedPasses(
            self.state,
            spec.block_tokens,
            self.forward,
            self._step,
            self.captures,
            self._max_rows,
            spec.stretched_prefill_tokens,
            loaded.model.dtype,
        )

    def graph_sizes(self) -> GraphSizes:
        """Those that a device like this one captures."""
        passes = self.spec.stretched_prefill_tokens if self.forward.fused else 0
        return GraphSizes(self._max_rows, passes, self.captures.enabled)

    def _compile_ahead(self, ahead: KernelsAhead, on_progress: Callable[[str], None]) -> None:
        """Every kernel that steps of a fused model without rare features launch, whether they are captured or not."""
        with ahead.walking() as walks:
            if not (walks and self.forward.fused):
                return
            self._forget_rows(None)
            for rows in batch_buckets(self._max_rows):
                self._step.enqueue(rows, GREEDY, rehearsal=True)
            for firsts in (1, 2, 16):  # a number is compiled for as one, as several or as so many times 16
                nobody = torch.full((firsts,), self.state.pad_slot, device=self.name)
                logits = self.mixed.logits[:1].expand(firsts, -1).clone()
                for features in (GREEDY, DRAWN):
                    self._step.choose(logits, nobody, features, decoding=0, rehearsal=True)
            few = token_buckets(self.spec.stretched_prefill_tokens)[:2]
            for size in (PassSize(rows, tokens) for rows in row_buckets(self._max_rows) for tokens in few):
                self.mixed.work(size)(True)
        ahead.finish(on_progress)

    def capture(self, size: GraphSize, record: int) -> tuple[bool, float | None]:
        """Capture a graph while nothing runs; `record` is the newest report that counts. Whether that worked, and the
        device time of a greedy step or a pass whose rows are all idle. Which rows decode has to be told again."""
        with torch.inference_mode(), torch.cuda.stream(self.streams.compute):
            self._forget_rows(self.mixed.inputs(size) if isinstance(size, PassSize) else None)
            if not self.captures.capture(size, self._work(size)):
                return False, None
            if isinstance(size, ChoiceSize) or (isinstance(size, DecodeSize) and size.features != GREEDY):
                return True, None
            ms = self.captures.device_ms(size)
            self._report.record.fill_(record)  # replays that were measured have reported
            return True, ms

    def _forget_rows(self, inputs: PassInputs | None) -> None:
        """Nobody decodes, and nobody's prompt is in a pass's inputs."""
        spread(self._nothing, StepWords([], decode_rows=0), self.state, self._step.rows, inputs, pick=True)

    def execute(self, program: Program) -> list[Landing]:
        """Enqueue a step on the current stream, which is `streams.compute`. Returns where the scores of prompts will
        stand once it has passed, chunk by chunk."""
        return self.run(program, self.tell(program))

    def tell(self, program: Program) -> PassInputs | None:
        """The first half of `execute`: everything that comes before the model. Returns where the chunks lie."""
        for place, table in program.tables:
            self._write_table(place, table)
        if program.features != GREEDY:
            self.rehearse(program)
        inputs = self._tell(program)
        if program.copies:
            self.forward.copy_blocks(self.staging.bring(np.array(program.copies, np.int64)))
        return inputs

    def run(self, program: Program, inputs: PassInputs | None) -> list[Landing]:
        """The second half."""
        scores: list[Landing] = []
        if inputs is not None and program.size is not None:
            self.mixed.run(program.size, program.firsts, program.features)
        elif inputs is not None and program.eager is not None:
            scores = self._prefill(program, program.eager, inputs)
        if program.step is not None:
            self.graphs.run(program.step)
        for record in program.records:
            num_bytes = record.rows * 8
            self.staging.count(choose_route(num_bytes, per_step=True, from_device=True), num_bytes)
        return scores

    def sizes_of(self, program: Program) -> list[GraphSize]:
        """The graphs that a step replays where there are such."""
        sizes: list[GraphSize] = []
        if program.size is not None:
            sizes += self.mixed.sizes_of(program.size, program.firsts, program.features)
        return sizes if program.step is None else [*sizes, program.step]

    def rehearse(self, program: Program) -> None:
        """What the graphs of a step hold, where there is no such graph: once, without a trace, before any of it waits
        for the host."""
        for size in self.sizes_of(program):
            self.captures.prepare(size, self._work(size))

    def _work(self, size: GraphSize) -> Enqueue:
        return self.graphs.work(size) if isinstance(size, DecodeSize) else self.mixed.work(size)

    def recover(self, record: int) -> None:
        """After a failed launch: `record` is the newest report that counts, memory is given back. Returns when nothing
        runs."""
        self._report.record.fill_(record)
        torch.cuda.empty_cache()
        self.streams.compute.synchronize()

    def close(self) -> None:
        self.streams.close()
        self.captures.close()

    def _tell(self, program: Program) -> PassInputs | None:
        """What changed since the last step and what is to be prefilled, in one copy and one launch; nothing at all in
        a steady step. Returns where the chunks lie on the device."""
        words = program.words
        if words is None:
            return None
        inputs = None
        if program.size is not None:
            inputs = self.mixed.inputs(program.size)
        elif program.eager is not None:
            inputs = PassInputs.empty(words.tokens, words.chunks, self.name)
        packed = self.staging.pack(words.arrays)
        with self.streams.copied_before_compute():
            self.staging.copy(packed)
        try:
            spread(packed.words, words, self.state, self._step.rows, inputs, program.features == GREEDY)
        finally:  # a step that fails must not cost a slot as well
            self.staging.release(packed)
        for init in program.rare:
            self.state.write_rare(init)
        return inputs

    def _write_table(self, place: int, table: Int32Array) -> None:
        packed = self.staging.pack([table])
        with self.streams.copied_before_compute():
            self.staging.copy(packed)
        try:
            self.state.write_table(place, packed.words[: packed.num_words])
        finally:
            self.staging.release(packed)

    def _prefill(self, program: Program, chunks: EagerChunks, inputs: PassInputs) -> list[Landing]:
        logits = self.prefill_logits(chunks, inputs)
        scores = score_chunks(chunks.scored, logits[chunks.firsts :], self.staging.bring)
        landed = [tuple(map(self.staging.land, parts)) for parts in scores]
        logits = logits[: chunks.firsts]
        self.state.set_lengths(inputs.slots, inputs.context_lens)
        if chunks.firsts:
            self._report.record.add_(1)
            if STRUCTURED in program.features.asked and (chunks.firsts, program.features) not in self._rehearsed:
                # A kernel's first use may wait for those that run.
                nobody = torch.full_like(inputs.last_slots[: chunks.firsts], self.state.pad_slot)
                self._step.choose(logits.clone(), nobody, program.features, decoding=0, rehearsal=True)
                self._rehearsed.add((chunks.firsts, program.features))
            self._step.choose(logits, inputs.last_slots[: chunks.firsts], program.features, decoding=0)
        return landed

    def prefill_logits(self, chunks: EagerChunks, inputs: PassInputs) -> torch.Tensor:
        """Of the chunks' last tokens, then of those that are scored. Leaves K and V behind, and nothing else."""
        batch = inputs.batch(self.state, self.spec.block_tokens, chunks.longest, chunks.reach)
        rows = inputs.last_rows[: chunks.firsts]
        if chunks.scored:
            rows = torch.cat((rows, scored_rows(chunks.scored, self.name)))
        return self.forward.prefill(inputs.ids.long(), inputs.positions.long(), rows, batch)

    def _decode_forward(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context_lens: torch.Tensor
    ) -> torch.Tensor:
        return self.forward.decode(self.state, self.spec.block_tokens, ids, positions, rows, context_lens)
