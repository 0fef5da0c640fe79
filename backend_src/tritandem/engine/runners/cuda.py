"""The runner on CUDA: steps are enqueued, never waited for; the host reads tokens some launches later.

Owns the order of launches, the report ring's numbering and the steps in flight. Slot rows, staging, graphs,
forward pass and sampling are in files of their own. Used by the core's thread only.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...config import EngineConfig
from ...contracts import ConfigError, Int32Array
from ...telemetry.step_meter import StepMeter
from ..model.device_forward import DeviceForward
from ..model.loader import LoadedModel
from ..rows.pack import PassInputs, StepWords, pack_step, spread
from ..rows.state import SlotState
from ..step import PrefillChunk, SamplingFeatures, StepFailed, StepPlan, StepResult
from .decode_step import GREEDY, WORDS_PER_ROW, DecodeStep, Report
from .graphs import DecodeGraphs, GraphCache
from .memory import cuda_spec, measure_and_allocate
from .mixed_pass import MAX_CHUNKS, MixedPasses, PassSize
from .staging import StagingPool, choose_route
from .streams import Streams, cuda_event

log = logging.getLogger(__name__)

RING_DEPTH = 64
MAX_STEPS_IN_FLIGHT = RING_DEPTH // 2 - 1  # a step writes at most two records


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a record in order, without padding, from row `first` on; the record holds `stride` rows."""

    record: int
    slots: Sequence[int]
    stride: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class _InFlight:
    step_id: int
    launched_ns: int
    done: torch.cuda.Event
    parts: tuple[_Part, ...]
    features: SamplingFeatures
    after_gap: _Gap | None


@dataclass(frozen=True, slots=True)
class _Gap:
    """The device had nothing to do between two events, the second of which lies right before a step."""

    ran_dry: torch.cuda.Event
    resumed: torch.cuda.Event


class CudaRunner:
    """`Runner` with launch-ahead. Raises ConfigError when weights and one sequence do not fit the device."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        on_progress: Callable[[str], None],
        meter: StepMeter | None = None,
    ) -> None:
        started = time.monotonic()
        self._device = torch.device(loaded.model.device)
        torch.cuda.set_device(self._device)
        self.streams = Streams(self._device)
        self.staging = StagingPool(self._device, lambda: cuda_event(blocking=True))
        max_rows = config.max_sequences or 256
        try:
            with torch.inference_mode(), torch.cuda.stream(self.streams.compute):
                self.forward = DeviceForward(loaded, config, max_rows, on_progress)
                cache = measure_and_allocate(loaded, config, self.forward, max_rows, on_progress)
                self.forward.use(cache)
                self.spec = spec = cuda_spec(loaded, config, cache.keys[0].shape[0], max_rows)
                max_blocks = -(-spec.max_context_tokens // spec.block_tokens)
                self.state = SlotState.empty(spec.num_slots, max_blocks, spec.vocab_size, self._device)
                record = torch.zeros(1, dtype=torch.int64, device=self._device)
                self._ring = self.staging.ring((RING_DEPTH, (max_rows + MAX_CHUNKS) * WORDS_PER_ROW))
                self._ring_host = self._ring.numpy()
                self._report = Report(self._ring, record)
                self._step = step = DecodeStep(self.state, self._decode_forward, self._report, max_rows, MAX_CHUNKS)
                nothing = torch.zeros(1, dtype=torch.int32, device=self._device)
                spread(nothing, StepWords([], decode_rows=0), self.state, step.rows, None, False)  # compiles it now
                self.captures = graph_cache = GraphCache(
                    self.streams.compute, config.cuda_graphs and self.forward.capturable
                )
                self.graphs = DecodeGraphs(graph_cache, step.enqueue, max_rows)
                self.mixed = MixedPasses(
                    self.state,
                    spec.block_tokens,
                    self.forward,
                    step,
                    graph_cache,
                    max_rows,
                    spec.stretched_prefill_tokens,
                    loaded.model.dtype,
                )
                if config.graph_capture == "lazy":
                    self.mixed.capture_lazily()
                else:
                    self.graphs.warm_up(on_progress)
                    self.mixed.warm_up(self.graphs, on_progress)
                    record.zero_()  # replays that were measured have reported
                if self.mixed.efficient_tokens:
                    self.spec = replace(spec, efficient_prefill_tokens=self.mixed.efficient_tokens)
                if graph_cache.captured():
                    on_progress(
                        f"{graph_cache.captured()} graphs took {graph_cache.capture_s:.1f} s "
                        f"and {graph_cache.capture_bytes / 2**20:.0f} MiB"
                    )
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"the model does not fit the memory of {self._device}: {error}") from error
        self._rows: tuple[int, ...] = ()
        self._record = 0
        self._in_flight: deque[_InFlight] = deque()
        self._read: deque[StepResult] = deque()
        self._newest_done: torch.cuda.Event | None = None
        self._meter = meter
        if meter is not None:
            meter.staged_bytes = self.staging.bytes_by_kind
            meter.gpu_uuid = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
        on_progress(f"ready after {time.monotonic() - started:.1f} s on top of loading")

    # -- Runner ----------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step. Raises StepFailed; rows that joined before the failure stay as they were written."""
        launched_ns = time.monotonic_ns()
        while len(self._in_flight) >= MAX_STEPS_IN_FLIGHT:
            self._in_flight[0].done.synchronize()
            self._read.append(self._take_oldest())
        parts: list[_Part] = []
        try:
            with torch.inference_mode(), torch.cuda.stream(self.streams.compute):
                gap = self._gap()
                self._enqueue(plan, parts)
                done = cuda_event(blocking=True, timing=self._meter is not None)
                done.record()
        except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
            self._recover()
            slots = [*(chunk.slot for chunk in plan.prefill), *plan.decode_slots]
            raise StepFailed(f"{type(error).__name__}: {error}", slots) from error
        self._newest_done = done
        self._in_flight.append(_InFlight(plan.step_id, launched_ns, done, tuple(parts), plan.features, gap))

    def collect(self, wait: bool) -> StepResult | None:
        if self._read:
            return self._read.popleft()
        if not self._in_flight:
            return None
        done = self._in_flight[0].done
        try:
            if not _passed(done):
                if not wait:
                    return None
                done.synchronize()
        except RuntimeError:  # the device broke: this result never comes, and must not be waited for again
            self._in_flight.popleft()
            raise
        return self._take_oldest()

    def pending(self) -> int:
        return len(self._in_flight) + len(self._read)

    def busy(self) -> bool:
        try:
            return bool(self._in_flight) and not _passed(self._in_flight[-1].done)
        except RuntimeError:  # the device broke: `collect` says whose step that was
            return False

    def close(self) -> None:
        self.streams.close()
        self._in_flight.clear()
        self._read.clear()
        self.captures.close()

    # -- launching -------------------------------------------------------------------------------------

    def _gap(self) -> _Gap | None:
        """Set when the device has run out of steps before this launch although sequences live. Only such a launch
        records a second event; the time between the two is the device's own."""
        if self._meter is None or not self._meter.busy or self._newest_done is None or not _passed(self._newest_done):
            return None
        resumed = cuda_event(timing=True)
        resumed.record()
        return _Gap(self._newest_done, resumed)

    def _enqueue(self, plan: StepPlan, parts: list[_Part]) -> None:
        size = self.mixed.size(len(plan.decode_slots), plan.prefill) if plan.prefill else None
        inputs = self._tell(plan, size)
        if inputs is not None:
            if size is not None:
                self._mixed(plan, size, parts)
            else:
                self._prefill(plan.prefill, plan.features, inputs, parts)
        if plan.decode_slots and not (size is not None and size.rows):
            bucket = self.graphs.bucket(len(plan.decode_slots))
            self.graphs.run(bucket, plan.features)
            parts.append(_Part(self._reported(bucket), plan.decode_slots, bucket))

    def _reported(self, rows: int) -> int:
        """The number of the record of `rows` rows that the launches before have counted up."""
        self._record += 1
        num_bytes = rows * 8
        self.staging.count(choose_route(num_bytes, per_step=True, from_device=True), num_bytes)
        return self._record

    def _tell(self, plan: StepPlan, size: PassSize | None) -> PassInputs | None:
        """What changed since the last step and what is to be prefilled, in one copy and one launch; nothing at all in
        a steady step. Returns where the chunks lie on the device."""
        rows = tuple(plan.decode_slots)
        new_rows = bool(rows) and rows != self._rows
        words = pack_step(plan, new_rows, self.spec.vocab_size, self.spec.max_context_tokens)
        if words is None:
            return None
        inputs = None
        if size is not None:
            inputs = self.mixed.inputs(size)
        elif plan.prefill:
            inputs = PassInputs.empty(words.tokens, words.chunks, self._device)
        packed = self.staging.pack(words.arrays)
        with self.streams.copied_before_compute():
            self.staging.copy(packed)
        try:
            spread(packed.words, words, self.state, self._step.rows, inputs, plan.features == GREEDY)
        finally:  # a step that fails must not cost a slot as well
            self.staging.release(packed)
        if new_rows:
            self._rows = rows
        for init in plan.inits:
            self.state.write_rare(init)
        return inputs

    def _mixed(self, plan: StepPlan, size: PassSize, parts: list[_Part]) -> None:
        """Chunks and, where `size` has rows, decode rows in one pass and one record."""
        firsts = [chunk.slot for chunk in plan.prefill if chunk.last]
        stride = self.mixed.run(size, len(firsts), plan.features)
        record = self._reported(stride)
        parts += [
            _Part(record, firsts, stride, size.rows),
            _Part(record, plan.decode_slots if size.rows else (), stride),
        ]

    def _prefill(
        self, chunks: Sequence[PrefillChunk], features: SamplingFeatures, inputs: PassInputs, parts: list[_Part]
    ) -> None:
        """Chunks alone, launch by launch: more than a graph holds, or a model that is not fused."""
        longest = max(len(chunk.ids) for chunk in chunks)
        reach = max(chunk.start + len(chunk.ids) for chunk in chunks)
        firsts = [chunk.slot for chunk in chunks if chunk.last]
        batch = inputs.batch(self.state, self.spec.block_tokens, longest, reach)
        last_rows = inputs.last_rows[: len(firsts)]
        logits = self.forward.prefill(inputs.ids.long(), inputs.positions.long(), last_rows, batch)
        self.state.set_lengths(inputs.slots, inputs.context_lens)
        if firsts:
            self._report.record.add_(1)
            self._step.choose(logits, inputs.last_slots[: len(firsts)], features, decoding=0)
            parts.append(_Part(self._reported(len(firsts)), firsts, len(firsts)))

    def _decode_forward(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context_lens: torch.Tensor
    ) -> torch.Tensor:
        return self.forward.decode(self.state, self.spec.block_tokens, ids, positions, rows, context_lens)

    def _recover(self) -> None:
        """After a failed launch: whatever it did to the numbering of records is undone, memory is given back."""
        with torch.inference_mode(), torch.cuda.stream(self.streams.compute):
            self._report.record.fill_(self._record)
        self._rows = ()
        torch.cuda.empty_cache()

    # -- reading ---------------------------------------------------------------------------------------

    def _take_oldest(self) -> StepResult:
        """The result of the oldest step, which has passed on the device."""
        step = self._in_flight.popleft()
        if step.after_gap is not None and self._meter is not None:
            gap_ms = step.after_gap.ran_dry.elapsed_time(step.after_gap.resumed)
            self._meter.idle_gap.note(round(gap_ms * 1e6))
        wanted = step.features.top_logprobs
        widths = (1, 1) if wanted < 0 else (1, 1, 1, wanted, wanted)
        columns = [self._column(step.parts, sum(widths[:number]), width) for number, width in enumerate(widths)]
        return StepResult(
            step_id=step.step_id,
            slots=np.array([slot for part in step.parts for slot in part.slots], np.int32),
            tokens=columns[0][:, 0],
            finish=columns[1][:, 0].astype(np.uint8),
            launched_ns=step.launched_ns,
            finished_ns=time.monotonic_ns(),
            logprobs=columns[2][:, 0].view(np.float32) if wanted >= 0 else None,
            top_ids=columns[3] if wanted > 0 else None,
            top_logprobs=columns[4].view(np.float32) if wanted > 0 else None,
        )

    def _column(self, parts: Sequence[_Part], offset: int, width: int) -> Int32Array:
        """[R, width], a copy out of the ring: it is written again after RING_DEPTH records."""
        columns = [np.zeros((0, width), np.int32)]
        for part in parts:
            record, stride = self._ring_host[part.record % RING_DEPTH], part.stride
            words = record[offset * stride : (offset + width) * stride].reshape(stride, width)
            columns.append(words[part.first : part.first + len(part.slots)])
        return np.concatenate(columns)


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
