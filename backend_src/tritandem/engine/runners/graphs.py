"""CUDA graphs: work is captured once by key and replayed; what cannot be captured runs eagerly.

Owns the captured graphs and their shared memory pool. Knows nothing about what is captured: it is given a
function that enqueues it. Core thread.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Hashable
from typing import Any

import torch

from ..step import SamplingFeatures
from .streams import cuda_event

log = logging.getLogger(__name__)

Enqueue = Callable[[bool], None]  # told whether it is a rehearsal, which must leave no trace


def batch_buckets(max_rows: int) -> list[int]:
    """Batch sizes that get a graph of their own: fine steps where padding would cost most.

    1, 2, 4, then multiples of 8 to 64, of 16 to 128, of 32 beyond; the last is `max_rows`.
    """
    sizes = {1, 2, 4, *range(8, 65, 8), *range(64, 129, 16), *range(128, max_rows + 1, 32), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


class GraphCache:
    """Graphs by key. All share one memory pool: they run one after the other on one stream."""

    def __init__(self, stream: torch.cuda.Stream, enabled: bool) -> None:
        self.enabled = enabled
        self.capture_s = 0.0
        self.capture_bytes = 0
        self._stream = stream
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._refused: set[Hashable] = set()
        self._pool: Any = None  # the allocator's handle of the shared pool

    def run(self, key: Hashable, enqueue: Enqueue) -> None:
        """Enqueue the work of `key` on the current stream, by replay where there is a graph."""
        self.capture(key, enqueue)
        graph = self._graphs.get(key)
        if graph is None:
            enqueue(False)
        else:
            graph.replay()

    def prepare(self, key: Hashable, enqueue: Enqueue) -> None:
        """So that `run` of this key makes the host wait for nothing that runs: no capture, no kernel's first use."""
        self.capture(key, enqueue)
        if not self.enabled and key not in self._refused:
            enqueue(True)
            self._refused.add(key)

    def captured(self) -> int:
        return len(self._graphs)

    def capture(self, key: Hashable, enqueue: Enqueue) -> None:
        """Capture, unless that was done or refused before. Reasons of a refusal are logged.

        A rehearsal first compiles and loads every kernel, which a capture must not do. torch waits for the
        device before it captures: a key's first use costs running streams a pause.
        """
        if not self.enabled or key in self._graphs or key in self._refused:
            return
        started = time.monotonic()
        free_before = torch.cuda.mem_get_info(self._stream.device)[0]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                enqueue(True)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                enqueue(False)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            log.warning("no graph for %s, it runs eagerly: %s", key, error)
            self._refused.add(key)
            return
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
        self.capture_s += time.monotonic() - started
        self.capture_bytes += max(0, free_before - torch.cuda.mem_get_info(self._stream.device)[0])

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


class DecodeGraphs:
    """The decode step by batch size and sampling features; a variant is captured on its first use."""

    def __init__(
        self, cache: GraphCache, enqueue: Callable[[int, SamplingFeatures, bool], None], max_rows: int
    ) -> None:
        """`enqueue(batch size, features, rehearsal)`."""
        self.buckets = batch_buckets(max_rows)
        self._cache, self._enqueue = cache, enqueue
        self._idle_ms: dict[int, float] = {}  # device time of a step whose rows are all idle, by bucket

    def bucket(self, rows: int) -> int:
        """The smallest captured batch size that holds `rows`."""
        return self.buckets[bisect_left(self.buckets, rows)]

    def warm_up(self, on_progress: Callable[[str], None]) -> None:
        """Capture the greedy variant of every bucket, the largest first so that the others reuse its memory."""
        if not self._cache.enabled:
            return
        for index, size in enumerate(reversed(self.buckets)):
            self._cache.capture(*self._task(size, SamplingFeatures()))
            self._idle_ms[size] = self._cache.device_ms((size, SamplingFeatures())) or 0.0
            on_progress(f"decode graphs: {index + 1} of {len(self.buckets)}")

    def idle_ms(self, rows: int) -> float:
        """What the matrix products of a step over `rows` rows take, measured by `warm_up`; attention is not in it."""
        return self._idle_ms.get(self.bucket(rows), 0.0) if rows else 0.0

    def prepare(self, bucket: int, features: SamplingFeatures) -> None:
        """Have ready what `run` needs: a graph, or every kernel compiled and loaded."""
        self._cache.prepare(*self._task(bucket, features))

    def run(self, bucket: int, features: SamplingFeatures) -> None:
        """Enqueue one decode step over `bucket` rows."""
        self._cache.run(*self._task(bucket, features))

    def _task(self, bucket: int, features: SamplingFeatures) -> tuple[Hashable, Enqueue]:
        return (bucket, features), lambda rehearsal: self._enqueue(bucket, features, rehearsal)
