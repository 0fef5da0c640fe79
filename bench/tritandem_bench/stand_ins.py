"""Stand-ins for a model, a tokenizer and a client that cost next to nothing: what is left to measure, or to test, is
what lies between them. Knows nothing about Triton.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from tritandem.contracts.answers import Chunk
from tritandem.contracts.arrays import Int32Array
from tritandem.contracts.errors import TritandemError
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode, LoadSnapshot, TokenBatch

FIRST_ID, IDS = 1000, 20_000  # ordinary tokens in the vocabularies of all demo models


class FreeRunningService:
    """An EngineService without a model: every sequence gets a token each `step_s`, however fast they are fetched.

    Tokens that are due and not fetched are handed out together, as the real service does.
    """

    def __init__(self, step_s: float, max_sequences: int = 1024, max_context_tokens: int = 8192) -> None:
        self._step_s = step_s
        self._max_sequences, self._max_context_tokens = max_sequences, max_context_tokens
        self._left: dict[int, int] = {}
        self._first_ns: dict[int, int] = {}
        self._due_s = time.monotonic()
        self._steps = 0
        self._changed = threading.Condition()

    def submit(self, requests: Sequence[EngineRequest]) -> list[TritandemError | None]:
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
            max_context_tokens=self._max_context_tokens,
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
            return self._take(steps)

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


class NumberedService(FreeRunningService):
    """Token j of every answer is the same: a text out of order or with a gap shows."""

    def __init__(self, step_s: float) -> None:
        super().__init__(step_s)
        self._made: dict[int, int] = {}

    def _take(self, steps: int) -> TokenBatch:
        batch = super()._take(steps)
        tokens = []
        for seq_id, count in zip(batch.seq_ids.tolist(), batch.token_counts.tolist(), strict=True):
            made = self._made.get(seq_id, 0)
            tokens.append(np.arange(FIRST_ID + made, FIRST_ID + made + count, dtype=np.int32))
            self._made[seq_id] = made + count
        return dataclasses.replace(batch, tokens=np.concatenate(tokens))


class ServicePort:
    """A service as the EnginePort that the scheduler talks to, without the hop between two processes."""

    def __init__(self, service: FreeRunningService, name: str = "engine") -> None:
        self.name, self.messages = name, 0
        self._service = service

    def submit(self, requests: Sequence[EngineRequest]) -> list[TritandemError | None]:
        return self._service.submit(requests)

    def cancel(self, seq_ids: Sequence[int]) -> None:
        self._service.cancel(seq_ids)

    def load(self) -> LoadSnapshot:
        return self._service.load()

    def stream(self) -> Iterator[TokenBatch]:
        while self._service.live():
            batch = self._service.next_batch(1.0)
            if batch is not None:
                self.messages += 1
                yield batch


class TableStep(NamedTuple):
    text: str
    stopped: bool
    tokens_used: int


class TableText:
    """The cheapest detokenizer there can be: one look-up a token, no stop words."""

    def __init__(self) -> None:
        self._words = [f" w{i}" for i in range(FIRST_ID + IDS)]

    def open(self, prompt_ids: Int32Array, stop_words: tuple[str, ...], min_tokens: int, control_tokens: bool) -> None:
        return None

    def push(self, states: list[Any], tokens: Int32Array, counts: Int32Array) -> list[TableStep]:
        ids, words, steps, start = tokens.tolist(), self._words, [], 0
        for count in counts.tolist():
            steps.append(TableStep("".join([words[i] for i in ids[start : start + count]]), False, count))
            start += count
        return steps

    def flush(self, state: Any) -> str:
        return ""

    def stop_word(self, state: Any) -> str:
        return ""


class SleepingSink:
    """A round trip of `trip_s` that releases the interpreter lock, as a Triton response does."""

    def __init__(self, trip_s: float, ended: threading.Semaphore) -> None:
        self._trip_s, self._ended = trip_s, ended
        self.responses = self.tokens = 0
        self.first_late_s: float | None = None

    def send(self, chunk: Chunk) -> None:
        time.sleep(self._trip_s)
        self.responses += 1
        self.tokens += chunk.num_output_tokens

    def finish(self, chunk: Chunk) -> None:
        self.send(chunk)
        assert chunk.stamps is not None
        self.first_late_s = (chunk.stamps.first_sent_ns - chunk.stamps.first_token_ns) / 1e9
        self._ended.release()

    def fail(self, error: TritandemError) -> None:
        raise error

    def cancelled(self) -> bool:
        time.sleep(self._trip_s)
        return False
