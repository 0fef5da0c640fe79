"""A runner without a model: the KV cache holds token ids, the next token is arithmetic on what is read there.

A block that is shared wrongly, reused too early or not in the table changes the arithmetic, so wrong
bookkeeping shows as wrong tokens. Results may stay unread for some launches, as on a device.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from tritandem.contracts.stream import FinishCode
from tritandem.engine.step import RunnerSpec, SlotInit, StepPlan, StepResult

VOCAB = 1000


def next_token(context: Sequence[int]) -> int:
    """Depends on every token of the context and on its place."""
    total = 17
    for token in context:
        total = (total * 31 + token + 1) % 1_000_003
    return total % VOCAB


def expected_output(prompt: Sequence[int], max_tokens: int, stop_ids: Sequence[int] = ()) -> list[int]:
    """What a sequence must produce."""
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context))
        if context[-1] in stop_ids:
            break
    return context[len(prompt) :]


@dataclass
class _Row:
    init: SlotInit
    remaining: int
    length: int = 0
    last_token: int = -1
    finished: bool = False
    table: dict[int, int] = field(default_factory=dict)


class ArithmeticRunner:
    """`Runner` on numpy arrays."""

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        block_tokens: int = 4,
        prefill_tokens: int = 16,
        launch_ahead_steps: int = 0,
    ) -> None:
        context = (num_blocks - 1) * block_tokens
        self.spec = RunnerSpec(
            "arithmetic",
            num_slots,
            num_blocks,
            block_tokens,
            context,
            prefill_tokens,
            prefill_tokens // 2,
            ((num_slots, prefill_tokens // 4),),
            VOCAB,
            launch_ahead_steps,
        )
        self._kv = np.full((num_blocks, block_tokens), -1)
        self._rows: dict[int, _Row] = {}
        self._unread: deque[StepResult] = deque()
        self.closed = False

    def launch(self, plan: StepPlan) -> None:
        assert len(self._unread) <= self.spec.launch_ahead_steps, "launched further ahead than allowed"
        spec = self.spec
        budget = spec.stretched_prefill_tokens if plan.decode_slots else spec.prefill_tokens_per_step
        assert sum(len(chunk.ids) for chunk in plan.prefill) <= budget, "over budget"
        launched_ns = time.monotonic_ns()
        for slot in plan.releases:
            self._rows.pop(slot, None)
        for init in plan.inits:
            assert init.slot not in self._rows, "a slot is taken while it is in use"
            self._rows[init.slot] = _Row(init, init.sampling.max_tokens - len(init.output_ids))
        for slot, index, block in [] if plan.block_updates is None else plan.block_updates.tolist():
            assert block != 0, "the null block is in a table"
            self._rows[slot].table[index] = block
        for source, target in plan.copies:
            self._kv[target] = self._kv[source]
        produced = []
        for chunk in plan.prefill:
            row = self._rows[chunk.slot]
            for position, token in enumerate(chunk.ids.tolist(), chunk.start):
                self._store(row, position, token)
            row.length = chunk.start + len(chunk.ids)
            if chunk.last:
                assert row.length == len(row.init.prompt_ids) + len(row.init.output_ids), "not the last chunk"
                produced.append((chunk.slot, *self._sample(row)))
        for slot in plan.decode_slots:
            row = self._rows[slot]
            if row.finished:
                produced.append((slot, -1, FinishCode.RUNNING))
                continue
            self._store(row, row.length, row.last_token)
            row.length += 1
            produced.append((slot, *self._sample(row)))
        columns = list(zip(*produced, strict=True)) or [(), (), ()]
        slots, tokens, finish = (np.array(column, np.int32) for column in columns)
        self._unread.append(
            StepResult(plan.step_id, slots, tokens, finish.astype(np.uint8), launched_ns, time.monotonic_ns())
        )

    def collect(self, wait: bool) -> StepResult | None:
        if self._unread and (wait or len(self._unread) > self.spec.launch_ahead_steps):
            return self._unread.popleft()
        return None

    def pending(self) -> int:
        return len(self._unread)

    def busy(self) -> bool:
        return False

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    def _place(self, row: _Row, position: int) -> tuple[int, int]:
        return row.table[position // self.spec.block_tokens], position % self.spec.block_tokens

    def _store(self, row: _Row, position: int, token: int) -> None:
        self._kv[self._place(row, position)] = token

    def _sample(self, row: _Row) -> tuple[int, FinishCode]:
        row.last_token = next_token([int(self._kv[self._place(row, position)]) for position in range(row.length)])
        row.remaining -= 1
        finish = FinishCode.LENGTH if row.remaining == 0 else FinishCode.RUNNING
        if row.last_token in row.init.stop_ids:
            finish = FinishCode.STOP
        row.finished = finish != FinishCode.RUNNING
        return row.last_token, finish
