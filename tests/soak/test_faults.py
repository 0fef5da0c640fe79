"""Claims about outages of a soak: one for every time that the server was replaced, by whomever, with new clients."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from tests.soak import faults
from tests.soak.faults import Faults, read_fault
from tests.soak.served import READY, Served

DIED = "[   70.0 s] tritonserver was ended by SIGABRT"


class Said(Served):
    """What it said, without a server; who is harmed says so."""

    def __init__(self) -> None:
        self.said = [(0.0, READY), (0.1, "[   61.8 s] try: tritandem generate")]
        self._changed = threading.Condition()
        self.shm_prefixes = set()

    def say(self, *lines: str) -> None:
        with self._changed:
            self.said += [(time.monotonic(), line) for line in lines]
            self._changed.notify_all()

    def wait_ready(self, times: int, timeout_s: float) -> float:
        with self._changed:
            if not self._changed.wait_for(lambda: self.times(READY) >= times, timeout_s):
                raise RuntimeError("not ready")
        return time.monotonic()

    def signal_model(self, model: str, number: signal.Signals) -> bool:
        self.say(f"1 of 4 model processes have died: {model}")
        return True


def run(program: Callable[[Said, Faults, list[str]], Coroutine[Any, Any, None]]) -> tuple[Faults, list[str]]:
    """The program beside a watch; what `on_back` saw."""

    async def both() -> tuple[Faults, list[str]]:
        served, backs = Said(), list[str]()

        async def on_back() -> None:
            backs.append(served.said[-1][1])

        found = Faults(served, on_back)
        watching = asyncio.create_task(found.watch())
        running = asyncio.create_task(program(served, found, backs))
        done, _ = await asyncio.wait({watching, running}, return_when=asyncio.FIRST_COMPLETED, timeout=60)
        for task in (watching, running):
            task.cancel()
        for task in done:
            await task
        return found, backs

    return asyncio.run(both())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "LOOK_S", 0.001)


def test_a_server_that_breaks_by_itself_is_an_outage_with_new_clients_and_is_told() -> None:
    async def program(served: Said, found: Faults, backs: list[str]) -> None:
        died_s = time.monotonic()
        served.say(DIED, "[   70.1 s] restart 1 in 1 s")
        while not found.outages:
            await asyncio.sleep(0)
        assert found.outages[0][0] < died_s
        assert found.outages[0][1] == float("inf")
        assert backs == []
        served.say(READY, "[   61.8 s] try: tritandem generate")
        await found.whole()

    found, backs = run(program)
    assert found.unplanned == [DIED]
    assert len(backs) == len(found.outages) == 1
    assert time.monotonic() < found.outages[0][1] < float("inf")


def test_what_was_planned_is_an_outage_and_no_fault_of_the_server() -> None:
    async def program(served: Said, found: Faults, backs: list[str]) -> None:
        hurting = asyncio.create_task(found.run([read_fault("kill engine")], 0.0, 0.0))
        while not found.done:
            await asyncio.sleep(0)
        served.say("[   70.1 s] restart 1 in 1 s", READY)
        await hurting

    found, backs = run(program)
    assert (found.unplanned, len(found.outages), len(backs)) == ([], 1, 1)


def test_a_server_that_does_not_come_back_ends_the_soak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "RESTART_TIMEOUT_S", 0.01)

    async def program(served: Said, found: Faults, backs: list[str]) -> None:
        served.say(DIED)
        await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="not ready"):
        run(program)
