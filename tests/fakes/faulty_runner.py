"""An arithmetic runner whose steps break now and then, in every way in which a device's can."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from tritandem.contracts.stream import FinishCode
from tritandem.engine.step import StepFailed, StepPlan, StepResult

from tests.fakes.arithmetic_runner import ArithmeticRunner, _Row

NOT_FINITE = -7  # instead of a token id in the cache: whoever reads it has no next token


class FaultyRunner(ArithmeticRunner):
    """`Runner`. `faults`: how likely each kind is, for a step:

    - refused: nothing of it runs, its launch raises
    - half: its prompts are stored and their first tokens chosen, then its launch raises
    - not finite: one of its rows stores NOT_FINITE
    - lost: it stores nothing; that shows when its result is collected

    `hurt` are the prompts whose own passes were not sound: these may fail, no other.
    """

    def __init__(self, rng: random.Random, faults: dict[str, float], **sizes: Any) -> None:
        super().__init__(**sizes)
        self._rng, self._faults = rng, faults
        self._breaking: int | None = None  # the slot whose stores are not finite in this step
        self._storing = True
        self._lost: set[int] = set()  # steps
        self.hurt: set[bytes] = set()
        self.happened: dict[str, int] = dict.fromkeys(faults, 0)

    def launch(self, plan: StepPlan) -> None:
        slots = [*(chunk.slot for chunk in plan.prefill), *plan.decode_slots]
        kinds = list(self._faults)
        kind = self._rng.choices([*kinds, ""], [*self._faults.values(), 1 - sum(self._faults.values())])[0]
        if kind:
            self.happened[kind] += 1
        if kind == "refused":
            raise StepFailed("refused", slots)
        if kind == "half":
            super().launch(dataclasses.replace(plan, decode_slots=()))
            self._unread.pop()
            for init in plan.inits:  # what a step that failed brought comes once more
                del self._rows[init.slot]
            raise StepFailed("broke half-way", slots)
        self._breaking = self._rng.choice(slots) if kind == "not finite" else None
        self._storing = kind != "lost"
        super().launch(plan)
        if kind == "lost":
            self._lost.add(plan.step_id)
        doubtful = slots if self._lost else [self._breaking] if self._breaking is not None else []
        self.hurt |= {self._rows[slot].init.prompt_ids.tobytes() for slot in doubtful}

    def collect(self, wait: bool) -> StepResult | None:
        result = super().collect(wait)
        if result is not None and result.step_id in self._lost:
            self._lost.remove(result.step_id)
            raise RuntimeError("the device broke")
        return result

    def _store(self, row: _Row, position: int, token: int) -> None:
        if self._storing:
            super()._store(row, position, NOT_FINITE if row.init.slot == self._breaking else token)

    def _sample(self, row: _Row) -> tuple[int, FinishCode]:
        token, finish = super()._sample(row)
        if any(self._kv[self._place(row, position)] == NOT_FINITE for position in range(row.length)):
            row.finished = True
            return 0, FinishCode.ERROR
        return token, finish
