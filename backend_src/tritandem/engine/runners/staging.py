"""Host memory that the device can read or write: pinned memory is allocated here (a few words, in `parallel/peers.py`).

Owns the pinned slots, their device mirrors and the rule when a slot may be written again. Used by the core's
thread. Knows nothing about what the bytes mean. The life of one staged copy (-> is an event wait on the
device, never on the host):

    core thread   | write slot | copy enqueued | ... free to go on ...          | slot is written again
    copy-in       .            | ===H2D===> copied                              |   only once `read` has passed
    compute       .                             -> waits, kernels read mirror, records `read`

Several arrays travel as one copy, one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...contracts.arrays import Int32Array

SIZE_CLASSES = (4 << 10, 32 << 10, 256 << 10, 2 << 20)  # bytes
SLOT_ALIGNMENT = 256
_LARGEST_ZERO_COPY = 8 << 10


class Route(str, Enum):
    """How bytes reach the device; also the label of the counters."""

    PINNED = "pinned"
    PAGEABLE = "pageable"
    ZERO_COPY = "zero_copy"


def choose_route(num_bytes: int, per_step: bool, from_device: bool) -> Route:
    """The way one transfer takes.

    - Small results of every step: zero-copy. The last kernel writes them over the bus, which spares a copy
      command and its start-up time (a few microseconds) in each step.
    - Everything of a step that fits a slot: pinned, because only then is the copy asynchronous.
    - Larger or rare transfers (weights, tables at load): pageable. Pinning costs about a millisecond for
      each 4 MB and takes the pages from the system; a transfer made once does not earn that back.
    """
    if per_step and from_device and num_bytes <= _LARGEST_ZERO_COPY:
        return Route.ZERO_COPY
    if per_step and num_bytes <= SIZE_CLASSES[-1]:
        return Route.PINNED
    return Route.PAGEABLE


class Event(Protocol):
    """What staging needs of torch.cuda.Event."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def record(self) -> None:
        """On the current stream."""


@dataclass(slots=True)
class Slot:
    """One pinned buffer and its device mirror, both int32 and of the class's size."""

    host: torch.Tensor
    mirror: torch.Tensor
    words: Int32Array  # the pinned buffer again
    size_class: int  # bytes
    read: Event  # recorded after the last kernel that reads the mirror
    in_flight: bool = False


@dataclass(slots=True)
class Counters:
    """Totals since start, by route."""

    transfers: dict[Route, int]
    num_bytes: dict[Route, int]


@dataclass(frozen=True, slots=True)
class Packed:
    """int32 words inside a slot."""

    slot: Slot
    num_words: int

    @property
    def words(self) -> torch.Tensor:
        """The device mirror, of at least `num_words`; valid from `StagingPool.copy` until `release`."""
        return self.slot.mirror


class StagingPool:
    """Slots by size class. `slots_per_class` are allocated at once; more only while all are in flight."""

    def __init__(
        self,
        device: torch.device,
        make_event: Callable[[], Event],
        slots_per_class: int = 4,
        max_slots_per_class: int = 16,
        pin: bool = True,
    ) -> None:
        """`pin=False` and events of one's own let the bookkeeping run without CUDA."""
        self._device, self._make_event, self._pin = device, make_event, pin
        self._max_slots = max_slots_per_class
        self.counters = Counters(dict.fromkeys(Route, 0), dict.fromkeys(Route, 0))
        self._slots: dict[int, list[Slot]] = {
            size: [self._new_slot(size) for _ in range(slots_per_class)] for size in SIZE_CLASSES
        }

    def ring(self, shape: Sequence[int]) -> torch.Tensor:
        """A zeroed int32 pinned tensor that kernels write directly; lives as long as its owner."""
        return torch.zeros(tuple(shape), dtype=torch.int32, pin_memory=self._pin)

    def pack(self, arrays: Sequence[Int32Array]) -> Packed:
        """Write flat arrays into one free slot, one behind the other without gaps.

        Raises ValueError when they do not fit the largest class.
        """
        num_words = sum(len(array) for array in arrays)
        slot = self._take(num_words * 4)
        np.concatenate(arrays, out=slot.words[:num_words], casting="no")
        return Packed(slot, num_words)

    def copy(self, packed: Packed) -> None:
        """Enqueue the copy to the mirror on the current stream."""
        count = packed.num_words
        self.count(Route.PINNED, count * 4)
        packed.slot.mirror[:count].copy_(packed.slot.host[:count], non_blocking=True)

    def release(self, packed: Packed) -> None:
        """The current stream has been given the last reader; the slot is free once that has run."""
        packed.slot.read.record()
        packed.slot.in_flight = True
        self._slots[packed.slot.size_class].append(packed.slot)

    def bring(self, array: NDArray[Any]) -> torch.Tensor:
        """Enqueue a copy of a host array to the device on the current stream, as `land` does the other way."""
        self.count(Route.PINNED, array.nbytes)
        host = torch.from_numpy(array)
        return (host.pin_memory() if self._pin else host).to(self._device, non_blocking=True)

    def land(self, tensor: torch.Tensor) -> torch.Tensor:
        """Enqueue a copy of a device tensor to pinned memory of its own: rare, and of no fixed size. torch keeps such
        memory for the next of its size, and waits for the copy before it gives it to anybody else."""
        self.count(Route.PINNED, tensor.numel() * tensor.element_size())
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)
        return host.copy_(tensor, non_blocking=True)

    def count(self, route: Route, num_bytes: int) -> None:
        self.counters.transfers[route] += 1
        self.counters.num_bytes[route] += num_bytes

    def bytes_by_kind(self) -> dict[str, int]:
        """Totals since start. Any thread."""
        return {route.value: total for route, total in self.counters.num_bytes.items()}

    def _take(self, num_bytes: int) -> Slot:
        size = next((size for size in SIZE_CLASSES if size >= num_bytes), None)
        if size is None:
            raise ValueError(f"{num_bytes} bytes do not fit a staging slot; the largest has {SIZE_CLASSES[-1]}")
        free = self._slots[size]
        for index, slot in enumerate(free):
            if not slot.in_flight or slot.read.query():
                slot.in_flight = False
                return free.pop(index)
        if len(free) < self._max_slots:
            return self._new_slot(size)
        oldest = free.pop(0)
        oldest.read.synchronize()
        oldest.in_flight = False
        return oldest

    def _new_slot(self, size: int) -> Slot:
        buffer = torch.empty(size + SLOT_ALIGNMENT, dtype=torch.uint8, pin_memory=self._pin)
        begin = -buffer.data_ptr() % SLOT_ALIGNMENT
        host = buffer[begin : begin + size].view(torch.int32)
        mirror = torch.empty(size // 4, dtype=torch.int32, device=self._device)
        return Slot(host, mirror, host.numpy(), size, self._make_event())
