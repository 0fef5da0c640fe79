"""What the first engine that answers says of its size: needed once, before any request can be checked.

Asked on Triton's thread, which must not hang with an engine that hangs: a call to one never returns. Each engine is
asked on a thread of its own, once at a time. Knows nothing about requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent import futures

from ...contracts.errors import EngineFailed
from ...contracts.stream import EnginePort, LoadSnapshot


class FirstLoad:
    """`answer_s`: how long an engine may take. Belongs to one thread."""

    def __init__(self, engines: Sequence[EnginePort], answer_s: float) -> None:
        self._engines, self._answer_s = engines, answer_s
        self._calls: dict[str, tuple[float, futures.Future[LoadSnapshot]]] = {}

    def __call__(self) -> LoadSnapshot:
        """Of the first in order that answers in time. Raises EngineFailed when none does."""
        failure = EngineFailed("no engine is configured")
        asked = [(engine.name, *self._ask(engine)) for engine in self._engines]
        for name, asked_s, call in asked:
            try:
                return call.result(max(0.0, asked_s + self._answer_s - time.monotonic()))
            except futures.TimeoutError:
                failure = EngineFailed(f"{name}: no answer to a call for {self._answer_s:.1f} s")
            except EngineFailed as error:
                failure = error
        raise failure

    def _ask(self, engine: EnginePort) -> tuple[float, futures.Future[LoadSnapshot]]:
        """When it was asked, and its answer. One that still owes an answer is not asked again."""
        if engine.name not in self._calls or self._calls[engine.name][1].done():
            call: futures.Future[LoadSnapshot] = futures.Future()
            self._calls[engine.name] = time.monotonic(), call
            threading.Thread(target=_answer, args=(engine, call), name=f"ask-{engine.name}", daemon=True).start()
        return self._calls[engine.name]


def _answer(engine: EnginePort, call: futures.Future[LoadSnapshot]) -> None:
    try:
        call.set_result(engine.load())
    except Exception as error:
        call.set_exception(error)
