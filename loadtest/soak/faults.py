"""Kills model processes of a running server at planned moments and knows when the server was not whole."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from .served import READY, Served

RESTART_TIMEOUT_S = 180.0
# Channels and load balancers take a moment to see that it is back.
SETTLE_S = 2.0


class Faults:
    """`outages` are (from, to) in seconds; `on_back` runs once the server is ready again."""

    def __init__(self, served: Served, on_back: Callable[[], Awaitable[None]]) -> None:
        self._served, self._on_back = served, on_back
        self.outages: list[tuple[float, float]] = []
        self.killed: list[str] = []

    async def run(self, models: Sequence[str], begin_s: float, end_s: float) -> None:
        """Kill the models one after the other, evenly between the two moments. Raises RuntimeError when the server
        does not come back."""
        for index, model in enumerate(models):
            at_s = begin_s + (index + 0.5) * (end_s - begin_s) / len(models)
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            ready_before = self._served.times(READY)
            killed_s = time.monotonic()
            if not self._served.kill(model):
                raise RuntimeError(f"no process of the model {model} to kill")
            self.killed.append(model)
            self.outages.append((killed_s, float("inf")))
            await asyncio.to_thread(self._served.wait_ready, ready_before + 1, RESTART_TIMEOUT_S)
            await self._on_back()
            self.outages[-1] = (killed_s, time.monotonic() + SETTLE_S)
