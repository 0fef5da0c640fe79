"""The load of a soak: how fast the server can be, twice that at random moments, and clients that die.

Owns the running tasks and the victims' processes. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from .clients import WAYS, Clients
from .hostile import Hostile
from .ledger import CLOSED, HONEST_IDS, Entry, Ledger

VICTIM = Path(__file__).with_name("victim.py")
WARM_UP_SHARE = 0.5  # of the time of the closed loop, before it
VICTIM_STREAMS = 3
VICTIM_LIVES_S = (0.5, 4.0)  # after its first tokens, or after this long without any
VICTIM_STARTS_S = 20.0


class Load:
    """`clients` and `hostile` are asked for every request, because they are replaced with the server."""

    def __init__(
        self,
        ledger: Ledger,
        clients: Callable[[], Clients],
        hostile: Callable[[], Hostile],
        urls: dict[str, str],
        rng: random.Random,
    ) -> None:
        self._ledger, self._clients, self._hostile, self._urls, self._rng = ledger, clients, hostile, urls, rng
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Future[None]] = set()
        self.victims_killed = 0

    async def sustainable_rate(self, users: int, seconds: float) -> float:
        """Requests per second that end in a closed loop of so many polite clients, once it is in its stride."""
        begin_s = time.monotonic() + seconds * WARM_UP_SHARE
        end_s, done = begin_s + seconds, 0

        async def user() -> None:
            nonlocal done
            while time.monotonic() < end_s:
                await self._clients().reads_a_stream(self._new_id())
                done += begin_s <= time.monotonic() < end_s

        await asyncio.gather(*(user() for _ in range(users)))
        return done / seconds

    async def offer(self, rate: float, until_s: float) -> None:
        """Requests of every kind, Poisson arrivals, whether or not the ones before have been answered."""
        next_s = time.monotonic()
        while True:
            next_s += self._rng.expovariate(rate)
            if next_s >= until_s:
                return
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
            kinds = self._clients().kinds()
            [kind] = self._rng.choices(list(kinds), list(kinds.values()))
            self._start(kind(self._new_id()))

    async def be_hostile(self, every_s: float, until_s: float) -> None:
        """One act after the other, whether or not the ones before have ended; each as often as any other."""
        for turn in itertools.count():
            if time.monotonic() + every_s >= until_s:
                return
            await asyncio.sleep(every_s)
            acts = self._hostile().acts()
            self._start(acts[turn % len(acts)](f"hostile-{turn}"))

    async def kill_clients(self, every_s: float, until_s: float) -> None:
        """One process at a time, in the middle of its answers."""
        while time.monotonic() + every_s < until_s:
            await asyncio.sleep(every_s)
            await self._kill_one()

    async def finish(self, timeout_s: float) -> None:
        """Wait for every request to end; what has not ended then has hung."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=timeout_s)

    def open_requests(self) -> int:
        return len(self._tasks)

    def _new_id(self) -> str:
        return f"{HONEST_IDS}{next(self._numbers)}"

    def _start(self, request: Awaitable[None]) -> None:
        task = asyncio.ensure_future(request)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            print(f"soak: a client broke: {error!r}", file=sys.stderr, flush=True)

    async def _kill_one(self) -> None:
        protocol, model = self._rng.choice(WAYS)
        ids = [self._new_id() for _ in range(VICTIM_STREAMS)]
        entries: list[Entry] = [
            self._ledger.open(request_id, f"killed, {protocol} {model}", time.monotonic()) for request_id in ids
        ]
        victim = await asyncio.create_subprocess_exec(
            sys.executable, str(VICTIM), protocol, model, self._urls[protocol], *ids,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        assert victim.stdout is not None
        with contextlib.suppress(asyncio.TimeoutError):  # then its requests wait in the queue: it dies there
            await asyncio.wait_for(victim.stdout.readline(), VICTIM_STARTS_S)
        await asyncio.sleep(self._rng.uniform(*VICTIM_LIVES_S))
        if victim.returncode is None:
            victim.kill()
            self.victims_killed += 1
        await victim.wait()
        for entry in entries:
            self._ledger.close(entry, CLOSED, time.monotonic())
