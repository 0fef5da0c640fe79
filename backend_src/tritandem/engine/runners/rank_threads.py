"""A thread for each rank of an engine, for what all ranks must do at once because they wait for each other.

Owns those threads and what happens when one of them fails: the others are told, and nobody waits for one that hangs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from ..parallel.interface import LOADING_PATIENCE_S, Exchange, RanksFailed
from .streams import cuda_stream

GRACE_S = 0.3  # for the others to end once one has failed

log = logging.getLogger(__name__)

T = TypeVar("T")
_Task = tuple[Callable[[], Any], "Future[Any]"]


class RankThreads:
    """`each` runs one call on every rank's thread, with the rank's device as the current one. `on_broken` is told once
    that the ranks are no longer together, and why."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges = exchanges
        self.on_broken: Callable[[str], None] = lambda reason: None
        self._told = False
        self._meeting = threading.Barrier(len(exchanges))
        self._tasks: list[SimpleQueue[_Task | None]] = [SimpleQueue() for _ in exchanges]
        self._threads: list[threading.Thread] = []
        for exchange, tasks in zip(exchanges, self._tasks, strict=True):
            name = f"rank-{exchange.rank.index}"
            serve = threading.Thread(target=_serve, args=(exchange.rank.device, tasks), name=name, daemon=True)
            serve.start()
            self._threads.append(serve)

    def each(self, call: Callable[[int], T]) -> list[T]:
        """`call(rank)` on every rank at once; results in order. Raises what the first that failed raised."""
        futures: list[Future[T]] = [Future() for _ in self._tasks]
        for rank, (tasks, future) in enumerate(zip(self._tasks, futures, strict=True)):
            tasks.put((lambda rank=rank: call(rank), future))  # type: ignore[misc]
        done, running = wait(futures, return_when=FIRST_EXCEPTION)
        errors = {
            rank: error for rank, future in enumerate(futures) if future in done and (error := future.exception())
        }
        if not errors:
            return [future.result() for future in futures]
        earlier = self.exchanges[0].failed()
        for rank, error in errors.items():
            self._meeting.abort()
            self.exchanges[rank].abort(f"rank {rank}: {type(error).__name__}: {error}")
        wait(running, timeout=GRACE_S)
        if earlier is not None:  # what ranks computed since then means nothing, and what they say of it neither
            raise RanksFailed(earlier) from next(iter(errors.values()))
        # Who only heard of it knows less than who failed.
        raise next((e for e in errors.values() if not isinstance(e, RanksFailed)), next(iter(errors.values())))

    def meet(self) -> None:
        """On every rank's thread: go on once all are here. Raises RanksFailed when one does not come."""
        try:
            self._meeting.wait(LOADING_PATIENCE_S)
        except threading.BrokenBarrierError:
            raise RanksFailed(self.exchanges[0].failed() or "a rank did not come") from None

    def require(self) -> None:
        """Raises RanksFailed once the ranks are no longer together."""
        reason = self.exchanges[0].failed()
        if reason is None:
            return
        if not self._told:
            self._told = True
            log.error("the ranks are no longer together: %s", reason)
            self.on_broken(reason)
        raise RanksFailed(reason)

    def close(self) -> None:
        """Nothing runs any more, or hangs, and is left to hang."""
        for exchange in self.exchanges:
            exchange.close()
        for tasks in self._tasks:
            tasks.put(None)
        for thread in self._threads:  # a thread that the interpreter's end meets on its way out ends the process
            thread.join(GRACE_S)


def _serve(device: torch.device, tasks: SimpleQueue[_Task | None]) -> None:
    on_cuda = device.type == "cuda"
    # Ranks that share a device must not share its default stream: who waits there would hold up whom it waits for.
    with torch.cuda.stream(cuda_stream(device)) if on_cuda else nullcontext():
        while (task := tasks.get()) is not None:
            call, future = task
            try:
                future.set_result(call())
            except BaseException as error:  # it is the caller's
                future.set_exception(error)
