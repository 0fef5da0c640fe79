"""The host's share of an engine step: planning, bookkeeping and handing tokens out, with a device that takes no time.

What a CUDA launch adds is not in it. One thread.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np

from ..contracts.fields import SamplingParams
from ..contracts.requests import EngineRequest
from ..contracts.stream import FinishCode
from ..engine.host.core import EngineCore
from ..engine.host.outbox import Outbox
from ..engine.step import RunnerSpec, StepPlan, StepResult

ROWS = 64
PROMPT_TOKENS = 128
BLOCK_TOKENS = 16
STEPS_OF_A_ROUND = 512
PREFILL_BUDGET = 8192
VOCAB_SIZE = 1000


class InstantRunner:
    """`Runner` whose rows all get token 1 and end when their budget is used up."""

    def __init__(self, blocks: int) -> None:
        context = PROMPT_TOKENS + STEPS_OF_A_ROUND
        prefill = (PREFILL_BUDGET,) * 3
        self.spec = RunnerSpec("none", ROWS, blocks, BLOCK_TOKENS, context, *prefill, VOCAB_SIZE, 0)
        self._left = np.zeros(ROWS, np.int64)
        self._unread: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        for init in plan.inits:
            self._left[init.slot] = init.sampling.max_tokens
        slots = np.array([*(chunk.slot for chunk in plan.prefill if chunk.last), *plan.decode_slots], np.int32)
        self._left[slots] -= 1
        finish = np.where(self._left[slots] == 0, FinishCode.LENGTH, FinishCode.RUNNING).astype(np.uint8)
        now_ns = time.monotonic_ns()
        self._unread.append(StepResult(plan.step_id, slots, np.ones_like(slots), finish, now_ns, now_ns))

    def collect(self, wait: bool) -> StepResult | None:
        return self._unread.popleft() if self._unread else None

    def pending(self) -> int:
        return len(self._unread)

    def busy(self) -> bool:
        return False

    def close(self) -> None:
        self._unread.clear()


def engine_cost(seconds: float) -> float:
    """CPU seconds a step of ROWS decoding sequences costs its thread, over at least `seconds` of them."""
    blocks = 1 + ROWS * (1 + (PROMPT_TOKENS + STEPS_OF_A_ROUND) // BLOCK_TOKENS)
    steps, start_s, spent_s, seq_id = 0, time.thread_time(), 0.0, 0
    while spent_s < seconds:
        outbox = Outbox()
        core = EngineCore(InstantRunner(blocks), outbox)
        for _ in range(ROWS):
            seq_id += 1
            ids = np.full(PROMPT_TOKENS, seq_id % VOCAB_SIZE, np.int32)
            core.add(EngineRequest(seq_id, ids, SamplingParams(max_tokens=STEPS_OF_A_ROUND)), time.monotonic_ns())
        while not core.idle():
            core.step()
            outbox.take(0.0)
            steps += 1
        spent_s = time.thread_time() - start_s
    return spent_s / steps
