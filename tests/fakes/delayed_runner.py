"""A real runner whose results stay unread until later steps were launched, as on a device that runs behind."""

from __future__ import annotations

import dataclasses
from collections import deque

from tritandem.engine.step import Runner, StepPlan, StepResult


class DelayedRunner:
    """`Runner`: a result becomes visible when `launch_ahead_steps` younger steps exist, or when waited for. A step that
    was launched behind another and depends on masks runs once they are there."""

    def __init__(self, inner: Runner, launch_ahead_steps: int) -> None:
        self._inner = inner
        self._unread: deque[StepResult] = deque()
        self.spec = dataclasses.replace(inner.spec, launch_ahead_steps=launch_ahead_steps)
        self.masks = inner.masks
        self._waiting: StepPlan | None = None
        self.deepest = self.waited = 0

    def launch(self, plan: StepPlan) -> None:
        assert len(self._unread) <= self.spec.launch_ahead_steps, "launched further ahead than allowed"
        assert self._waiting is None, "launched behind a step that waits for masks"
        if plan.masked_slots and self._unread:
            self._waiting = plan
            self.waited += 1
        else:
            self._run(plan)

    def masks_ready(self, step_id: int) -> None:
        if self._waiting is not None and self._waiting.step_id == step_id:
            plan, self._waiting = self._waiting, None
            self._run(plan)

    def _run(self, plan: StepPlan) -> None:
        self._inner.launch(plan)
        result = self._inner.collect(wait=True)
        assert result is not None
        self._unread.append(result)
        self.deepest = max(self.deepest, len(self._unread))

    def collect(self, wait: bool) -> StepResult | None:
        assert self._unread or self._waiting is None, "the device waits for masks that nobody wrote"
        if self._unread and (wait or len(self._unread) > self.spec.launch_ahead_steps):
            return self._unread.popleft()
        return None

    def pending(self) -> int:
        return len(self._unread) + (self._waiting is not None)

    def busy(self) -> bool:
        return self.pending() > 0

    def prepare(self) -> bool:
        return self._inner.prepare()

    def close(self) -> None:
        self._unread.clear()
        self._inner.close()
