"""An EngineService without a model: every sequence gets a token each `step_s`, however fast they are fetched.

Stands in for a GPU, so that what the hops behind it can deliver is measured and not the model. Tokens that are
due and not fetched are handed out together, as the real service does.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import numpy as np
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode, LoadSnapshot, TokenBatch
from tritandem.telemetry.step_meter import StepMeter

FIRST_ID, IDS = 1000, 20_000  # ordinary tokens in the vocabularies of all demo models


class FreeRunningService:
    def __init__(self, step_s: float, max_sequences: int = 1024, meter: StepMeter | None = None) -> None:
        """`meter` hears of every step, with durations that spread over several buckets as real ones do."""
        self._step_s, self._max_sequences, self._meter = step_s, max_sequences, meter
        self._left: dict[int, int] = {}
        self._first_ns: dict[int, int] = {}
        self._due_s = time.monotonic()
        self._steps = 0
        self._changed = threading.Condition()

    def submit(self, requests: Sequence[EngineRequest]) -> list[None]:
        with self._changed:
            if not self._left:
                self._due_s = time.monotonic() + self._step_s
            for request in requests:
                self._left[request.seq_id] = request.sampling.max_tokens
            self._changed.notify_all()
        return [None] * len(requests)

    def cancel(self, seq_ids: Sequence[int]) -> None:
        with self._changed:
            for seq_id in seq_ids:
                if seq_id in self._left:
                    self._left[seq_id] = 0

    def load(self) -> LoadSnapshot:
        blocks = 1 << 20
        return LoadSnapshot(
            running=len(self._left),
            free_blocks=blocks,
            total_blocks=blocks,
            block_tokens=16,
            max_sequences=self._max_sequences,
            max_context_tokens=8192,
            decode_step_ns=int(self._step_s * 1e9),
            prefill_token_ns=100,
            steps=self._steps,
        )

    def live(self) -> int:
        return len(self._left)

    def next_batch(self, timeout_s: float) -> TokenBatch | None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._left), timeout_s):
                return None
            self._changed.wait(max(0.0, min(self._due_s, deadline) - time.monotonic()))
            steps = 1 + int((time.monotonic() - self._due_s) / self._step_s)
            if steps < 1 or not self._left:
                return None
            self._due_s += steps * self._step_s
            self._steps += steps
            if self._meter is not None:
                self._note(self._meter, steps)
            return self._take(steps)

    def _note(self, meter: StepMeter, steps: int) -> None:
        for _ in range(steps):
            step_ns = int(self._step_s * 1e9 * random.uniform(0.2, 2.0))
            meter.launched(step_ns // 8, prefills=random.random() < 0.1)
            meter.decode_step.note(step_ns)
            meter.idle_gap.note(step_ns // 64)

    def close(self) -> None:
        with self._changed:
            self._left.clear()

    def _take(self, steps: int) -> TokenBatch:
        now_ns = time.monotonic_ns()
        seq_ids = np.fromiter(self._left, np.int64, len(self._left))
        left = np.fromiter(self._left.values(), np.int64, len(self._left))
        counts = np.minimum(left, steps).astype(np.int32)
        finish = np.where(left == counts, FinishCode.LENGTH, FinishCode.RUNNING).astype(np.uint8)
        stamps = np.full((len(seq_ids), 4), now_ns, np.int64)
        for row, (seq_id, count) in enumerate(zip(seq_ids.tolist(), counts.tolist(), strict=True)):
            stamps[row, 2] = self._first_ns.setdefault(seq_id, now_ns)
            self._left[seq_id] -= count
            if self._left[seq_id] == 0:
                del self._left[seq_id], self._first_ns[seq_id]
        total = int(counts.sum())
        return TokenBatch(
            seq_ids=seq_ids,
            token_counts=counts,
            tokens=FIRST_ID + (np.arange(total, dtype=np.int32) * 7 + self._steps) % IDS,
            finish=finish,
            cached_tokens=np.zeros(len(seq_ids), np.int32),
            stamps_ns=stamps,
            load=self.load(),
        )
