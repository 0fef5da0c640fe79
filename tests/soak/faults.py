"""Kills or stops model processes of a running server at planned moments and knows when the server was not whole, also
when it broke by itself."""

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
# Between a death and the word about it.
UNNOTICED_S = 3.0
LOOK_S = 0.25
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
    """Every time that the server is not whole, by our own hand or not. `outages` are (from, to) in seconds; `unplanned`
    holds what the server said when nobody had harmed it; `on_back` runs once it is ready again."""

    def __init__(self, served: Served, on_back: Callable[[], Awaitable[None]]) -> None:
        self._served, self._on_back = served, on_back
        self.outages: list[tuple[float, float]] = []
        self.done: list[str] = []
        self.unplanned: list[str] = []
        self._hit_s: float | None = None  # when we harmed it; None: nobody has since it was last ready
        self._whole = asyncio.Event()
        self._whole.set()

    async def run(self, faults: Sequence[Fault], begin_s: float, end_s: float) -> None:
        """One after the other, evenly between the two moments or as soon as the server is whole. Raises RuntimeError
        when there is nobody to harm."""
        for index, fault in enumerate(faults):
            at_s = begin_s + (index + 0.5) * (end_s - begin_s) / len(faults)
            await asyncio.sleep(max(0.0, at_s - time.monotonic()))
            await self.whole()
            self._begin(time.monotonic(), planned=True)
            if not self._served.signal_model(fault.model, SIGNALS[fault.what]):
                raise RuntimeError(f"no process of the model {fault.model}: {fault}")
            self.done.append(str(fault))
        await self.whole()

    async def whole(self) -> None:
        """Returns when no outage is going on."""
        await self._whole.wait()

    async def watch(self) -> None:
        """Until cancelled. Raises RuntimeError when the server does not come back."""
        while True:
            ready = self._served.times(READY)
            while (trouble := self._served.trouble(ready)) is None:
                await asyncio.sleep(LOOK_S)
            if self._hit_s is None:
                self.unplanned.append(trouble[1])
                self._begin(trouble[0] - UNNOTICED_S)
            await asyncio.to_thread(self._served.wait_ready, ready + 1, RESTART_TIMEOUT_S)
            await self._on_back()
            self.outages[-1] = (self.outages[-1][0], time.monotonic() + SETTLE_S)
            self._hit_s = None
            self._whole.set()

    def _begin(self, begin_s: float, planned: bool = False) -> None:
        self._whole.clear()
        self._hit_s = begin_s if planned else None
        self.outages.append((begin_s, float("inf")))
