"""The streams of one CUDA engine and how work is handed from one to the next: by events, never by the host.

Owns the streams. Timeline of a step that changes the batch, followed by two steady ones:

    host      pack | launch 1 | launch 2 | launch 3 | read 1 (waits on event 1) | launch 4 | ...
    copy-in        [H2D rows]
    compute             -> [spread][graph of the step     ]e1[decode graph]e2[decode graph]e3
    bus (out)                                    tokens 1 ~~~>   tokens 2 ~~~>   tokens 3 ~~~>

Tokens need no copy-out stream: the last kernel of a step writes them into pinned memory (`staging.ring`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def cuda_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def cuda_event(blocking: bool = False, timing: bool = False) -> torch.cuda.Event:
    """`blocking`: a host that waits sleeps instead of spinning, which two cores cannot afford."""
    return torch.cuda.Event(enable_timing=timing, blocking=blocking)  # type: ignore[no-untyped-call]


class Streams:
    """`compute` runs the model, `copy_in` carries staged rows to the device."""

    def __init__(self, device: torch.device) -> None:
        self.compute = cuda_stream(device)
        self.copy_in = cuda_stream(device)
        self._copied = cuda_event()  # a wait holds for the recording before it, whatever is recorded later

    @contextmanager
    def copied_before_compute(self) -> Iterator[None]:
        """Copies enqueued inside run on `copy_in`; what `compute` gets afterwards waits for them."""
        with torch.cuda.stream(self.copy_in):
            yield
            self._copied.record()
        self.compute.wait_event(self._copied)

    def close(self) -> None:
        """Wait for everything enqueued."""
        self.copy_in.synchronize()
        self.compute.synchronize()
