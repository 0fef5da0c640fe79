"""A real runner that breaks on chosen prompts or at a chosen launch."""

from __future__ import annotations

from collections.abc import Callable

from tritandem.engine.step import Runner, StepPlan, StepResult


class PoisonedRunner:
    """`Runner`: raises `error()` for every step that computes a slot whose prompt starts with `poison_id`."""

    def __init__(self, inner: Runner, poison_id: int, error: Callable[[list[int]], Exception]) -> None:
        self._inner, self._poison_id, self._error = inner, poison_id, error
        self._poisoned: set[int] = set()
        self.spec = inner.spec
        self.failures = 0

    def launch(self, plan: StepPlan) -> None:
        self._poisoned -= set(plan.releases)
        for init in plan.inits:
            if init.prompt_ids[0] == self._poison_id:
                self._poisoned.add(init.slot)
            else:
                self._poisoned.discard(init.slot)
        slots = [chunk.slot for chunk in plan.prefill] + list(plan.decode_slots)
        if self._poisoned & set(slots):
            self.failures += 1
            raise self._error(slots)
        self._inner.launch(plan)

    def collect(self, wait: bool) -> StepResult | None:
        return self._inner.collect(wait)

    def pending(self) -> int:
        return self._inner.pending()

    def busy(self) -> bool:
        return self._inner.busy()

    def prepare(self) -> bool:
        return self._inner.prepare()

    def close(self) -> None:
        self._inner.close()
