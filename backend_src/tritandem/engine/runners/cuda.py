"""The runner on CUDA: steps are enqueued, never waited for; the host reads tokens some launches later.

Keep this file minimal: every step passes through it. Owns the numbering of reports and the steps in flight; what to
run is `program.py`'s, who executes it `device.py`'s. Used by the core's thread only.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from ...config import EngineConfig
from ...contracts.arrays import Int32Array
from ...contracts.errors import ConfigError
from ...telemetry.step_meter import StepMeter
from ..model.loader import LoadedModel
from ..sampling.prompt_scores import host_scores
from ..step import STRUCTURED, SamplingFeatures, StepFailed, StepPlan, StepResult
from .device import RING_DEPTH, Device, Landing
from .graph_sizes import capture_first
from .pass_size import GraphSize
from .program import Part, Record, make_program
from .rank_devices import RankDevices
from .streams import cuda_event

NO_WAIT = 2**63 - 1  # as the number of a record: masks of all records are there
MAX_STEPS_IN_FLIGHT = RING_DEPTH // 2 - 1  # a step writes at most two records


@dataclass(frozen=True, slots=True)
class _InFlight:
    step_id: int
    launched_ns: int
    done: torch.cuda.Event
    first_record: int  # the number of the first of `records`
    records: tuple[Record, ...]
    features: SamplingFeatures
    after_gap: _Gap | None
    scores: list[Landing]


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
        make_device: Callable[[LoadedModel, EngineConfig, Callable[[str], None]], Device | RankDevices] = Device,
    ) -> None:
        self._told_rows: tuple[int, ...] = ()
        self._record = 0  # of the newest report that was launched
        try:
            self.device = make_device(loaded, config, on_progress)
            self.spec = self.device.spec
            self.sizes = self.device.graph_sizes()
            capture_first(self.sizes, self._capture, config.graph_capture == "start", on_progress)
            self._note_costs()
        except torch.OutOfMemoryError as error:
            raise ConfigError(f"the model does not fit the memory of {loaded.model.device}: {error}") from error
        self.masks = self.device.state.masks.numpy()
        self._in_flight: deque[_InFlight] = deque()
        self._read: deque[StepResult] = deque()
        self._newest_done: torch.cuda.Event | None = None
        self._meter = meter
        if meter is not None:
            meter.staged_bytes = self.device.staging.bytes_by_kind
            meter.gpu_uuid = f"GPU-{torch.cuda.get_device_properties(self.device.name).uuid}"

    # -- Runner ----------------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step. Raises StepFailed; rows that joined before the failure stay as they were written."""
        launched_ns = time.monotonic_ns()
        while len(self._in_flight) >= MAX_STEPS_IN_FLIGHT:
            self._in_flight[0].done.synchronize()
            self._read.append(self._take_oldest())
        device = self.device
        try:
            with torch.inference_mode(), torch.cuda.stream(device.streams.compute):
                gap = self._gap()
                program = make_program(plan, self._told_rows, self.spec, self.sizes.carrying, self.sizes.decode)
                scores = device.execute(program)
                done = cuda_event(blocking=True, timing=self._meter is not None)
                done.record()
        except (torch.OutOfMemoryError, RuntimeError, ValueError) as error:
            self._recover()
            slots = [*(chunk.slot for chunk in plan.prefill), *plan.decode_slots]
            raise StepFailed(f"{type(error).__name__}: {error}", slots) from error
        if program.decode_rows:
            self._told_rows = program.decode_rows
        self._newest_done = done
        first = self._record + 1
        self._record += len(program.records)
        records, features = program.records, plan.features
        self._in_flight.append(_InFlight(plan.step_id, launched_ns, done, first, records, features, gap, scores))

    def masks_ready(self, step_id: int) -> None:
        for step in self._in_flight:
            if step.step_id == step_id:
                self.device.masks_ready[0] = step.first_record + len(step.records) - 1

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

    def prepare(self) -> bool:
        size = self.sizes.next(self.device.captures.missed)
        if size is None:
            return False
        assert not self.pending(), "a capture between the steps of a stream"
        self._capture(size)
        self._note_costs()
        return True

    def close(self) -> None:
        self.device.masks_ready[0] = NO_WAIT
        self._in_flight.clear()
        self._read.clear()
        self.device.close()

    # -- capturing -------------------------------------------------------------------------------------

    def _capture(self, size: GraphSize) -> None:
        done, ms = self.device.capture(size, self._record)
        self.sizes.captured(size, ms) if done else self.sizes.refused(size)
        self._told_rows = ()

    def _note_costs(self) -> None:
        if efficient := self.sizes.efficient_tokens():
            passes = self.sizes.pass_tokens()
            self.spec = replace(self.spec, efficient_prefill_tokens=efficient, pass_tokens=passes)

    # -- launching -------------------------------------------------------------------------------------

    def _gap(self) -> _Gap | None:
        """Set when the device has run out of steps before this launch although sequences live. Only such a launch
        records a second event; the time between the two is the device's own."""
        if self._meter is None or not self._meter.busy or self._newest_done is None or not _passed(self._newest_done):
            return None
        resumed = cuda_event(timing=True)
        resumed.record()
        return _Gap(self._newest_done, resumed)

    def _recover(self) -> None:
        """After a failed launch: whatever it did to the numbering of records is undone."""
        ready = self.device.masks_ready
        ready[0] = NO_WAIT  # a choice that was enqueued waits for masks that never come
        with torch.inference_mode(), torch.cuda.stream(self.device.streams.compute):
            self.device.recover(self._record)
        ready[0] = self._record
        self._told_rows = ()

    # -- reading ---------------------------------------------------------------------------------------

    def _take_oldest(self) -> StepResult:
        """The result of the oldest step, which has passed on the device."""
        step = self._in_flight.popleft()
        if step.after_gap is not None and self._meter is not None:
            gap_ms = step.after_gap.ran_dry.elapsed_time(step.after_gap.resumed)
            self._meter.idle_gap.note(round(gap_ms * 1e6))
        if STRUCTURED in step.features.asked and self._meter is not None:
            for number in range(step.first_record, step.first_record + len(step.records)):
                self._meter.grammar_wait.note(int(self.device.mask_waits[number % RING_DEPTH]))
        wanted = step.features.top_logprobs
        widths = (1, 1) if wanted < 0 else (1, 1, 1, wanted, wanted)
        columns = [self._column(step, sum(widths[:number]), width) for number, width in enumerate(widths)]
        return StepResult(
            step_id=step.step_id,
            slots=np.array([slot for record in step.records for part in record.parts for slot in part.slots], np.int32),
            tokens=columns[0][:, 0],
            finish=columns[1][:, 0].astype(np.uint8),
            launched_ns=step.launched_ns,
            finished_ns=time.monotonic_ns(),
            logprobs=columns[2][:, 0].view(np.float32) if wanted >= 0 else None,
            top_ids=columns[3] if wanted > 0 else None,
            top_logprobs=columns[4].view(np.float32) if wanted > 0 else None,
            scores=[host_scores(*parts) for parts in step.scores],
        )

    def _column(self, step: _InFlight, offset: int, width: int) -> Int32Array:
        """[R, width], a copy out of the ring: it is written again after RING_DEPTH records."""
        columns = [np.zeros((0, width), np.int32)]
        for number, record in enumerate(step.records, start=step.first_record):
            words = self.device.ring[number % RING_DEPTH]
            rows = words[offset * record.rows : (offset + width) * record.rows].reshape(record.rows, width)
            columns += [_rows_of(part, rows) for part in record.parts]
        return np.concatenate(columns)


def _rows_of(part: Part, rows: Int32Array) -> Int32Array:
    return rows[part.first : part.first + len(part.slots)]


def _passed(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]
