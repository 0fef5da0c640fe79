"""CUDA graphs: work is captured by key and replayed; what was not captured runs eagerly.

Owns the captured graphs and their shared memory pool. Knows nothing about what is captured: it is given a
function that enqueues it. Core thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..step import SamplingFeatures
from .pass_size import DecodeSize
from .streams import cuda_event

log = logging.getLogger(__name__)

Enqueue = Callable[[bool], None]  # told whether it is a rehearsal, which must leave no trace
# Who has run eagerly so often without an idle moment is captured between two steps after all: that takes the host as
# long as one or two eager steps, each of them two to ten replays (12.5 and 5 ms: structured answers of an 8B model, 64
# rows, H200), and waits for nothing that runs.
MOST_MISSED = 8


class GraphCache:
    """Graphs by key. All share one memory pool: they run one after the other on one stream."""

    def __init__(self, stream: torch.cuda.Stream, enabled: bool, between_steps: bool = True) -> None:
        """`between_steps`: what is missed often is captured without an idle moment. Not where kernels may wait for
        another rank meanwhile: memory that a capture asks for waits for them."""
        self.enabled, self._between_steps = enabled, between_steps
        self.capture_bytes = 0
        self.missed: dict[Hashable, int] = {}  # how often each has run eagerly
        self._stream = stream
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._refused: set[Hashable] = set()
        self._pool: Any = None  # the allocator's handle of the shared pool

    def run(self, key: Hashable, enqueue: Enqueue) -> None:
        """Enqueue the work of `key` on the current stream, by replay where there is a graph."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
            return
        if not self.knows(key):
            self.prepare(key, enqueue)
        enqueue(False)

    def prepare(self, key: Hashable, enqueue: Enqueue) -> None:
        """Before a step that runs `key`, of which nothing waits for the host yet: a kernel's first use and a pool that
        grows wait for what runs."""
        if key in self._graphs:
            return
        missed = self.missed.get(key, 0)
        self.missed[key] = missed + 1
        if not missed:
            enqueue(True)
        elif self._between_steps and missed % MOST_MISSED == 0:
            self.capture(key, enqueue, rehearsed=True)

    def holds(self, key: Hashable) -> bool:
        """Whether there is a graph."""
        return key in self._graphs

    def knows(self, key: Hashable) -> bool:
        """Whether `run` need not rehearse."""
        return key in self._graphs or self.missed.get(key, 0) > 0

    def captured(self) -> int:
        return len(self._graphs)

    def capture(self, key: Hashable, enqueue: Enqueue, rehearsed: bool = False) -> bool:
        """Capture, unless that was done or refused before; whether there is a graph now. Reasons of a refusal are
        logged.

        A rehearsal first compiles and loads every kernel, which a capture must not do; `rehearsed`: that has been.
        Nothing is waited for, unless the pool of the graphs grows, and the first capture gives unused memory back to
        it: the largest comes first, so that the others fit.
        """
        if not self.enabled or key in self._graphs or key in self._refused:
            return key in self._graphs
        free_before = torch.cuda.mem_get_info(self._stream.device)[0]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                if not rehearsed:
                    enqueue(True)
                if self._pool is None:
                    torch.cuda.empty_cache()
                self._capture(graph, enqueue)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            log.warning("no graph for %s, it runs eagerly: %s", key, error)
            self._refused.add(key)
            return False
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
        self.missed.pop(key, None)
        self.capture_bytes += max(0, free_before - torch.cuda.mem_get_info(self._stream.device)[0])
        return True

    def device_ms(self, key: Hashable) -> float | None:
        """Device time of one replay on whatever its inputs hold now, the better of two; None without a graph."""
        graph = self._graphs.get(key)
        if graph is None:
            return None
        times = []
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                begin, end = cuda_event(timing=True), cuda_event(timing=True)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end))
        return float(min(times))

    def close(self) -> None:
        self._graphs.clear()
        self._pool = None

    def _capture(self, graph: torch.cuda.CUDAGraph, enqueue: Enqueue) -> None:
        """On the current stream. Without what `torch.cuda.graph` does before: it waits for the device and gives all
        unused memory back, of which the next step needs some again."""
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            enqueue(False)
        finally:
            graph.capture_end()


class DecodeGraphs:
    """Decode steps of their own, by size and sampling features."""

    def __init__(self, cache: GraphCache, enqueue: Callable[[int, SamplingFeatures, bool], None]) -> None:
        """`enqueue(rows, features, rehearsal)`."""
        self._cache, self._enqueue = cache, enqueue

    def run(self, size: DecodeSize) -> None:
        """Enqueue one decode step."""
        self._cache.run(size, self.work(size))

    def work(self, size: DecodeSize) -> Enqueue:
        return lambda rehearsal: self._enqueue(size.rows, size.features, rehearsal)
