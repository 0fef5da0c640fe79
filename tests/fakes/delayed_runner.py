"""A real runner whose results stay unread until later steps were launched, as on a device that runs behind."""

from __future__ import annotations

import dataclasses
from collections import deque

from tritandem.engine.step import Runner, StepPlan, StepResult


class DelayedRunner:
    """`Runner`: a result becomes visible when `launch_ahead_steps` younger steps exist, or when waited for."""

    def __init__(self, inner: Runner, launch_ahead_steps: int) -> None:
        self._inner = inner
        self._unread: deque[StepResult] = deque()
        self.spec = dataclasses.replace(inner.spec, launch_ahead_steps=launch_ahead_steps)
        self.deepest = 0

    def launch(self, plan: StepPlan) -> None:
        assert len(self._unread) <= self.spec.launch_ahead_steps, "launched further ahead than allowed"
        self._inner.launch(plan)
        result = self._inner.collect(wait=True)
        assert result is not None
        self._unread.append(result)
        self.deepest = max(self.deepest, len(self._unread))

    def collect(self, wait: bool) -> StepResult | None:
        if self._unread and (wait or len(self._unread) > self.spec.launch_ahead_steps):
            return self._unread.popleft()
        return None

    def pending(self) -> int:
        return len(self._unread)

    def busy(self) -> bool:
        return bool(self._unread)

    def close(self) -> None:
        self._unread.clear()
        self._inner.close()
