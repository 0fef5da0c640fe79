"""Host memory that the device can read or write: the only place that allocates pinned memory.

Owns the pinned slots, their device mirrors and the rule when a slot may be written again. Used by the core's
thread. Knows nothing about what the bytes mean. The life of one staged copy (-> is an event wait on the
device, never on the host):

    core thread   | write slot | copy enqueued | ... free to go on ...          | slot is written again
    copy-in       .            | ===H2D===> copied                              |   only once `read` has passed
    compute       .                             -> waits, kernels read mirror, records `read`

Several arrays travel as one copy, each 16-byte aligned inside the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

SIZE_CLASSES = (4 << 10, 32 << 10, 256 << 10, 2 << 20)  # bytes
SLOT_ALIGNMENT = 256
_ARRAY_ALIGNMENT = 16
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
    """One pinned buffer and its device mirror, both uint8 and of the class's size."""

    host: torch.Tensor
    mirror: torch.Tensor
    size_class: int
    read: Event  # recorded after the last kernel that reads the mirror
    in_flight: bool = False


@dataclass(slots=True)
class Counters:
    """Totals since start, by route."""

    transfers: dict[Route, int]
    num_bytes: dict[Route, int]
    arrays: int = 0  # arrays merged into the staged copies
    waits: int = 0  # times that no slot was free and the host had to wait
    grown: int = 0  # slots allocated beyond the first ones


_TORCH_DTYPES = {"int32": torch.int32, "int64": torch.int64, "float32": torch.float32, "uint8": torch.uint8}
Ranges = tuple[tuple[int, int, np.dtype[Any], tuple[int, ...]], ...]  # first byte, end, type and shape of each array


def layout(arrays: Sequence[NDArray[Any]]) -> tuple[Ranges, int]:
    """Where arrays lie when packed one behind the other, and the bytes of all of them."""
    ranges = []
    offset = 0
    for array in arrays:
        ranges.append((offset, offset + array.nbytes, array.dtype, array.shape))
        offset = _aligned(offset + array.nbytes, _ARRAY_ALIGNMENT)
    return tuple(ranges), offset


def views(buffer: torch.Tensor, ranges: Ranges) -> list[torch.Tensor]:
    """The arrays inside a uint8 buffer that was packed by `layout`."""
    return [buffer[begin:end].view(_TORCH_DTYPES[dtype.name]).view(shape) for begin, end, dtype, shape in ranges]


@dataclass(frozen=True, slots=True)
class Packed:
    """Arrays inside a slot, before and after the copy: views of the mirror in the order they were given."""

    slot: Slot
    num_bytes: int
    ranges: Ranges

    def device_arrays(self) -> list[torch.Tensor]:
        """Views of the device mirror; valid until `StagingPool.release`."""
        return views(self.slot.mirror, self.ranges)


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

    def pack(self, arrays: Sequence[NDArray[Any]]) -> Packed:
        """Write the arrays into one free slot, one behind the other; int32, int64, float32 or uint8.

        Raises ValueError when they do not fit the largest class.
        """
        ranges, num_bytes = layout(arrays)
        slot = self._take(num_bytes)
        host = slot.host.numpy()
        for (begin, end, _, _), array in zip(ranges, arrays, strict=True):
            host[begin:end] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.counters.arrays += len(ranges)
        return Packed(slot, num_bytes, ranges)

    def copy(self, packed: Packed) -> None:
        """Enqueue the copy to the mirror on the current stream."""
        self.count(Route.PINNED, packed.num_bytes)
        packed.slot.mirror[: packed.num_bytes].copy_(packed.slot.host[: packed.num_bytes], non_blocking=True)

    def release(self, packed: Packed) -> None:
        """The current stream has been given the last reader; the slot is free once that has run."""
        packed.slot.read.record()
        packed.slot.in_flight = True
        self._slots[packed.slot.size_class].append(packed.slot)

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
            self.counters.grown += 1
            return self._new_slot(size)
        self.counters.waits += 1
        oldest = free.pop(0)
        oldest.read.synchronize()
        oldest.in_flight = False
        return oldest

    def _new_slot(self, size: int) -> Slot:
        host = torch.empty(size + SLOT_ALIGNMENT, dtype=torch.uint8, pin_memory=self._pin)
        begin = -host.data_ptr() % SLOT_ALIGNMENT
        mirror = torch.empty(size, dtype=torch.uint8, device=self._device)
        return Slot(host[begin : begin + size], mirror, size, self._make_event())


def _aligned(value: int, alignment: int) -> int:
    return (value + alignment - 1) // alignment * alignment
