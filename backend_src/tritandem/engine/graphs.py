"""CUDA graphs of the decode step: which batch sizes are captured, when, and what happens when one cannot be.

Owns the captured graphs and their shared memory pool. Knows nothing about what a step computes: it is given
a function that enqueues the step for a batch size and a set of sampling features. Core thread.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch

from .step import SamplingFeatures

log = logging.getLogger(__name__)

EnqueueStep = Callable[[int, SamplingFeatures, bool], None]  # batch size, features, rehearsal
GraphKey = tuple[int, SamplingFeatures]


def batch_buckets(max_rows: int) -> list[int]:
    """Batch sizes that get a graph of their own: fine steps where padding would cost most.

    1, 2, 4, then multiples of 8 to 64, of 16 to 128, of 32 beyond; the last is `max_rows`.
    """
    sizes = {1, 2, 4, *range(8, 65, 8), *range(64, 129, 16), *range(128, max_rows + 1, 32), max_rows}
    return sorted(size for size in sizes if size <= max_rows)


class DecodeGraphs:
    """Replays the decode step of a bucket; captures a variant on its first use, or falls back to eager."""

    def __init__(self, enqueue: EnqueueStep, max_rows: int, stream: torch.cuda.Stream, enabled: bool) -> None:
        self.buckets = batch_buckets(max_rows)
        self.capture_s = 0.0
        self.capture_bytes = 0
        self._enqueue, self._stream, self._enabled = enqueue, stream, enabled
        self._graphs: dict[GraphKey, torch.cuda.CUDAGraph] = {}
        self._refused: set[GraphKey] = set()
        self._pool: Any = None  # the allocator's handle of the shared pool

    def bucket(self, rows: int) -> int:
        """The smallest captured batch size that holds `rows`."""
        return self.buckets[bisect_left(self.buckets, rows)]

    def warm_up(self, on_progress: Callable[[str], None]) -> None:
        """Capture the greedy variant of every bucket, the largest first so that the others reuse its memory."""
        if not self._enabled:
            return
        for index, size in enumerate(reversed(self.buckets)):
            self._capture((size, SamplingFeatures()))
            on_progress(f"decode graphs: {index + 1} of {len(self.buckets)}")
        on_progress(f"decode graphs took {self.capture_s:.1f} s and {self.capture_bytes / 2**20:.0f} MiB")

    def run(self, bucket: int, features: SamplingFeatures) -> None:
        """Enqueue one decode step on the current stream, by replay where there is a graph."""
        key = (bucket, features)
        if self._enabled and key not in self._graphs and key not in self._refused:
            self._capture(key)
        graph = self._graphs.get(key)
        if graph is None:
            self._enqueue(*key, False)
        else:
            graph.replay()

    def captured(self) -> int:
        return len(self._graphs)

    def close(self) -> None:
        self._graphs.clear()
        self._pool = None

    def _capture(self, key: GraphKey) -> None:
        """A rehearsal first compiles and loads every kernel, which a capture must not do. Reasons are logged.

        torch waits for the device before it captures: a variant's first use costs running streams a pause.
        """
        started = time.monotonic()
        free_before = torch.cuda.mem_get_info(self._stream.device)[0]
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                self._enqueue(*key, True)
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self._enqueue(*key, False)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            log.warning("decode graph for batch %d, %s runs eagerly: %s", *key, error)
            self._refused.add(key)
            return
        self._pool = self._pool or graph.pool()
        self._graphs[key] = graph
        self.capture_s += time.monotonic() - started
        self.capture_bytes += max(0, free_before - torch.cuda.mem_get_info(self._stream.device)[0])
