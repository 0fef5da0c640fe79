"""What a step of an 8B model in bfloat16 takes on one H200, and a runner that only lets that time pass.

The figures are measured ones (docs/benchmarks/engine.md: products by their height, attention, norms, whole steps);
between them it is interpolated. Which pass carries a step is decided by the engine's own functions. Knows nothing of
who runs; time is the simulation's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

import numpy as np
from tritandem.contracts.stream import FinishCode
from tritandem.engine.runners.pass_size import PassSize, cheapest, efficient_tokens, row_buckets, token_buckets
from tritandem.engine.step import RunnerSpec, StepPlan, StepResult, stretched_tokens

BLOCK_TOKENS = 16
TOKENS_PER_STEP, INTERLEAVED_TOKENS = 8192, 2048  # the engine's defaults on CUDA
KV_BLOCKS = 50_000  # 800,000 tokens: 0.9 of what 16 GB of weights leave of 141 GB, at 128 KiB a token

# ms of all products of 32 layers and the head over so many rows; 448 is slow in the vendor's library.
_PRODUCT_ROWS = (1, 64, 256, 320, 384, 447, 448, 511, 512, 1024, 2048, 2312)
_PRODUCT_MS = (3.75, 4.01, 5.73, 7.1, 9.0, 9.9, 15.6, 15.7, 11.4, 21.0, 42.1, 43.0)
_PRODUCT_MS_PER_ROW = 0.0186  # of higher ones
# ms of a decode step without attention
_DECODE_ROWS = (1, 8, 32, 64, 128, 256)
_DECODE_MS = (3.78, 4.03, 4.24, 4.31, 4.75, 6.36)
_DECODE_MS_PER_ROW = 0.0225
_ATTENTION_MS = 3.5e-5  # for each row and token of context in the cache
_CHUNK_PAIR_MS, _CHUNK_MS = 2.2e-6, 0.4  # attention inside chunks: for each pair of tokens, and at least
_PASS_ROW_MS, _PASS_TOKEN_MS, _PASS_MS = 0.0024, 0.0016, 0.2  # norms, rotary, gate
_LAUNCH_MS = {False: 0.35, True: 1.1}  # host time, without prefill and with


@dataclass
class Clock:
    """Simulated time."""

    now_ns: int = 10**9

    def read(self) -> int:
        return self.now_ns

    def reach(self, at_ns: int) -> None:
        self.now_ns = max(self.now_ns, at_ns)


def products_ms(rows: int) -> float:
    beyond = max(0, rows - _PRODUCT_ROWS[-1])
    return float(np.interp(rows, _PRODUCT_ROWS, _PRODUCT_MS)) + beyond * _PRODUCT_MS_PER_ROW


def decode_ms(rows: int, context_tokens: int = 0) -> float:
    """A decode step over `rows` rows that hold `context_tokens` together."""
    beyond = max(0, rows - _DECODE_ROWS[-1])
    fixed = float(np.interp(rows, _DECODE_ROWS, _DECODE_MS)) + beyond * _DECODE_MS_PER_ROW
    return fixed + context_tokens * _ATTENTION_MS


def pass_ms(size: PassSize) -> float:
    """A captured pass of this size whose rows and chunks have no context yet."""
    height = size.rows + size.tokens
    return products_ms(height) + _PASS_MS + size.rows * _PASS_ROW_MS + size.tokens * _PASS_TOKEN_MS


@dataclass
class _Row:
    remaining: int
    length: int = 0
    finished: bool = False


class TimedRunner:
    """`Runner` without tokens: every answer has its full length, every step takes what it is measured to take."""

    def __init__(self, num_slots: int, clock: Clock) -> None:
        most_tokens = stretched_tokens(INTERLEAVED_TOKENS, TOKENS_PER_STEP)
        self._row_buckets, self._token_buckets = row_buckets(num_slots), token_buckets(most_tokens)
        costs = {size: pass_ms(size) for size in self._sizes()}
        self._costs, self._choices = costs, cheapest(costs, decode_ms)
        self.spec = RunnerSpec(
            device="an H200 by its measured times",
            num_slots=num_slots,
            num_blocks=KV_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            max_context_tokens=131_072,
            prefill_tokens_per_step=TOKENS_PER_STEP,
            interleaved_prefill_tokens=INTERLEAVED_TOKENS,
            efficient_prefill_tokens=efficient_tokens(costs, decode_ms),
            vocab_size=128_256,
            launch_ahead_steps=3,
            pass_tokens=tuple(self._token_buckets),
        )
        self.clock = clock
        self.masks = np.zeros((0, 0), np.int32)
        self._rows: dict[int, _Row] = {}
        self._unread: deque[StepResult] = deque()
        self._free_ns = 0  # when the device has done all that was launched

    def _sizes(self) -> list[PassSize]:
        return [PassSize(rows, tokens) for rows in self._row_buckets for tokens in self._token_buckets]

    # -- Runner ----------------------------------------------------------------------------------------

    def masks_ready(self, step_id: int) -> None:
        """No answer has a structure."""

    def launch(self, plan: StepPlan) -> None:
        launched_ns = self.clock.now_ns
        self.clock.now_ns += round(_LAUNCH_MS[bool(plan.prefill)] * 1e6)
        for slot in plan.releases:
            self._rows.pop(slot, None)
        for init in plan.inits:
            self._rows[init.slot] = _Row(init.sampling.max_tokens - len(init.output_ids))
        took_ms = self._step_ms(plan)
        self._free_ns = max(self._free_ns, self.clock.now_ns) + round(took_ms * 1e6)
        produced = []
        for chunk in plan.prefill:
            self._rows[chunk.slot].length = chunk.start + len(chunk.ids)
            if chunk.last:
                produced.append((chunk.slot, *self._sample(self._rows[chunk.slot])))
        for slot in plan.decode_slots:
            row = self._rows[slot]
            row.length += not row.finished
            produced.append((slot, -1, FinishCode.RUNNING) if row.finished else (slot, *self._sample(row)))
        columns = list(zip(*produced, strict=True)) or [(), (), ()]
        slots, tokens, finish = (np.array(column, np.int32) for column in columns)
        result = StepResult(plan.step_id, slots, tokens, finish.astype(np.uint8), launched_ns, self._free_ns)
        self._unread.append(result)

    def collect(self, wait: bool) -> StepResult | None:
        if self._unread and wait:
            self.clock.reach(self._unread[0].finished_ns)
        if self._unread and self._unread[0].finished_ns <= self.clock.now_ns:
            return self._unread.popleft()
        return None

    def pending(self) -> int:
        return len(self._unread)

    def busy(self) -> bool:
        return self._free_ns > self.clock.now_ns

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        self._unread.clear()

    # -- time ------------------------------------------------------------------------------------------

    def _step_ms(self, plan: StepPlan) -> float:
        rows = len(plan.decode_slots)
        context_tokens = sum(self._rows[slot].length for slot in plan.decode_slots)
        tokens = sum(len(chunk.ids) for chunk in plan.prefill)
        if not tokens:
            return decode_ms(rows, context_tokens)
        pairs = sum(len(chunk.ids) * (chunk.start + len(chunk.ids) / 2) for chunk in plan.prefill)
        attention_ms = max(_CHUNK_MS, pairs * _CHUNK_PAIR_MS)
        size = self._pass(rows, tokens, len(plan.prefill))
        if size is None:  # launch by launch, apart from the decode step
            return pass_ms(PassSize(0, tokens)) + attention_ms + (decode_ms(rows, context_tokens) if rows else 0)
        apart = decode_ms(rows, context_tokens) if rows and not size.rows else context_tokens * _ATTENTION_MS
        return self._costs[size] + attention_ms + apart

    def _pass(self, rows: int, tokens: int, chunks: int) -> PassSize | None:
        bucket = self._row_buckets[bisect_left(self._row_buckets, rows)]
        for most in self._token_buckets[bisect_left(self._token_buckets, tokens) :]:
            size = PassSize(bucket, most)
            if chunks <= size.chunks:
                return self._choices[size]
        return None

    def _sample(self, row: _Row) -> tuple[int, FinishCode]:
        row.remaining -= 1
        row.finished = row.remaining == 0
        return 0, FinishCode.LENGTH if row.finished else FinishCode.RUNNING
