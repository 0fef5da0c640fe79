"""Kills or stops model processes of a running server at planned moments and knows when the server was not whole."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from .served import READY, Served

RESTART_TIMEOUT_S = 180.0
# Channels and load balancers take a moment to see that it is back.
SETTLE_S = 2.0
SIGNALS = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP}


class Fault(NamedTuple):
    """`kill`: a process ends at once; `hang`: it is there and does nothing, which the server must notice by itself."""

    what: str
    model: str

    def __str__(self) -> str:
        return f"{self.what} {self.model}"


def read_fault(words: str) -> Fault:
    """`kill engine` or `hang engine`. Raises ValueError."""
    what, _, model = words.strip().partition(" ")
    if what not in SIGNALS or not model:
        raise ValueError(f"given {words!r}, allowed: {' or '.join(SIGNALS)}, then a model")
    return Fault(what, model)


class Faults:
    """`outages` are (from, to) in seconds; `on_back` runs once the server is ready again."""

    def __init__(self, served: Served, on_back: Callable[[], Awaitable[None]]) -> None:
        self._served, self._on_back = served, on_back
        self.outages: list[tuple[float, float]] = []
        self.done: list[str] = []

    async def run(self, faults: Sequence[Fault], begin_s: float, end_s: float) -> None:
        """One after the other, evenly between the two moments. Raises RuntimeError when the server does not come
        back."""
        for index, fault in enumerate(faults):
            at_s = begin_s + (index + 0.5) * (end_s - begin_s) / len(faults)
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            ready_before = self._served.times(READY)
            hit_s = time.monotonic()
            if not self._served.signal_model(fault.model, SIGNALS[fault.what]):
                raise RuntimeError(f"no process of the model {fault.model}: {fault}")
            self.done.append(str(fault))
            self.outages.append((hit_s, float("inf")))
            await asyncio.to_thread(self._served.wait_ready, ready_before + 1, RESTART_TIMEOUT_S)
            await self._on_back()
            self.outages[-1] = (hit_s, time.monotonic() + SETTLE_S)
