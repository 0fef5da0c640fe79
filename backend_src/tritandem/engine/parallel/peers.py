"""Ranks on GPUs of one process that read each other's memory: the exchange of the graphs.

Owns each rank's buffer and flags and chooses how a sum travels; the kernels are in `peer_kernels.py`. Several ranks
may share a device: a grid is small enough that all of theirs are on it at once. No call waits on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import torch
from triton import next_power_of_2

from ...machine.peer_access import why_apart
from .interface import STEP_PATIENCE_S, Rank, Sizes
from .peer_kernels import (
    COMBINE,
    CONTROL_WORDS,
    PATIENCE,
    SHOW,
    best_kernel,
    gather_kernel,
    one_shot_kernel,
    two_shot_kernel,
)

MOST_RANKS = 8
Stages = tuple[int, int]  # first and last
ALL_STAGES: Stages = (SHOW, COMBINE)

_DEVICE_CHANNELS = 128  # programs of all the ranks on one device: about one a multiprocessor
_BLOCKS = (1024, 2048, 4096, 8192)  # elements of a tile
_MOST_HALF_BYTES = 64 << 20  # of a buffer; larger calls travel in pieces
_WAIT_BYTES = 1_400_000  # what crosses while ranks wait once more: 4 us at 350 GB/s
_FAILURE_WORDS = 16
_NS = 1_000_000_000


class Unreachable(ValueError):
    """Two GPUs cannot read each other's memory; the message says which and what to do."""


def two_shot_pays(ranks: int, num_bytes: int) -> bool:
    """A one-shot sum reads `ranks` - 1 parts, a two-shot one 2 / `ranks` of that, for another wait."""
    return num_bytes * (ranks - 1) * (ranks - 2) / ranks > _WAIT_BYTES


def require_reach(devices: Sequence[torch.device]) -> None:
    """Raises Unreachable for GPUs that are apart; switches peer access on for all others."""
    if reason := why_apart([device.index or 0 for device in devices]):
        raise Unreachable(reason)
    for one, other in permutations(dict.fromkeys(devices), 2):
        torch.empty(8, device=one).copy_(torch.empty(8, device=other))  # the first copy switches it on


@dataclass(frozen=True, slots=True)
class _Memory:
    """What one rank has on its device."""

    buffer: torch.Tensor  # uint8 [channels * 2 * region], read by all
    flags: torch.Tensor  # int64 [2, ranks, channels], written by all
    epochs: torch.Tensor  # int64 [channels]
    control: torch.Tensor  # int64 [CONTROL_WORDS]


class _Group:
    """What the ranks share."""

    def __init__(self, ranks: Sequence[Rank], sizes: Sizes) -> None:
        self.ranks = ranks
        devices = [rank.device for rank in ranks]
        self.channels = _DEVICE_CHANNELS // max(devices.count(device) for device in devices) // 16 * 16
        self.region_bytes = _region_bytes(sizes, len(ranks), self.channels)
        on_gpus = devices[0].type == "cuda"
        # A row a rank, written by its kernels: the host's word to give up, then who did not come. All rows are aligned
        # alike, so that one binary serves all ranks.
        self.failures = torch.zeros((len(ranks), _FAILURE_WORDS), dtype=torch.int32, pin_memory=on_gpus)
        self.failures_host = self.failures.numpy()
        self.memories = [self._allocate(device) for device in devices]
        self.reason: str | None = None
        if on_gpus:
            for device in dict.fromkeys(devices):
                torch.cuda.synchronize(device)  # zeros are there before a peer's first word

    def _allocate(self, device: torch.device) -> _Memory:
        count = len(self.ranks)
        memory = _Memory(
            torch.empty(self.channels * 2 * self.region_bytes, dtype=torch.uint8, device=device),
            torch.zeros((2, count, self.channels), dtype=torch.int64, device=device),
            torch.zeros(self.channels, dtype=torch.int64, device=device),
            torch.zeros(CONTROL_WORDS, dtype=torch.int64, device=device),
        )
        memory.control[PATIENCE] = _patience(STEP_PATIENCE_S, device)
        return memory

    def end(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.failures_host[:, 0] = 1

    def failed(self) -> str | None:
        if self.reason is None and self.failures_host.any():
            waiting, late = (int(number) for number in np.argwhere(self.failures_host[:, 1:])[0])
            self.end(f"rank {waiting} waited in vain for rank {late} on {self.ranks[late].device}")
        return self.reason


class PeerExchange:
    """`Exchange` of one rank; its device is the current one when it is called."""

    def __init__(self, rank: Rank, group: _Group) -> None:
        self.rank, self._group, self._own = rank, group, group.memories[rank.index]

    @classmethod
    def together(cls, ranks: Sequence[Rank], sizes: Sizes) -> list[PeerExchange]:
        """One each. Raises Unreachable, and ValueError for more ranks than there are kernels for."""
        if not 2 <= len(ranks) <= MOST_RANKS:
            raise ValueError(f"ranks: given {len(ranks)}, allowed: 2 to {MOST_RANKS}")
        require_reach([rank.device for rank in ranks if rank.device.type == "cuda"])
        group = _Group(ranks, sizes)
        return [cls(rank, group) for rank in ranks]

    def add_sum(self, partial: torch.Tensor, residual: torch.Tensor) -> None:
        self._sum(partial, residual, residual)

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        self._sum(partial, None, partial)
        return partial

    def best(self, values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.empty_like(values), torch.empty_like(ids)
        self.best_stages((values, ids), found, ALL_STAGES)
        return found

    def gather_columns(self, part: torch.Tensor) -> torch.Tensor:
        out = part.new_empty((part.shape[0], part.shape[1] * self.rank.count))
        rows = max(1, self._most(part) // part.shape[1])
        for begin in range(0, part.shape[0], rows):
            self.gather_stages(part[begin : begin + rows], out[begin : begin + rows], ALL_STAGES)
        return out

    def patience(self, seconds: float) -> None:
        self._own.control[PATIENCE].fill_(_patience(seconds, self.rank.device))

    def abort(self, reason: str) -> None:
        self._group.end(reason)

    def failed(self) -> str | None:
        return self._group.failed()

    def close(self) -> None:
        self._group.memories.clear()
        del self._own

    # -- one launch each; stages are for whoever plays all the ranks one after the other ---------------

    def sum_stages(
        self, part: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, stages: Stages, two_shot: bool
    ) -> None:
        """Flat tensors, which one call carries."""
        self._launch(
            two_shot_kernel if two_shot else one_shot_kernel,
            (part, part if residual is None else residual, out),
            part,
            stages,
            _block(part.numel(), self._group.channels),
            HAS_RESIDUAL=residual is not None,
        )

    def gather_stages(self, part: torch.Tensor, out: torch.Tensor, stages: Stages) -> None:
        block = _block(part.numel(), self._group.channels)
        self._launch(gather_kernel, (part, out), part, stages, block, columns=part.shape[1])

    def best_stages(
        self, best: tuple[torch.Tensor, torch.Tensor], out: tuple[torch.Tensor, torch.Tensor], stages: Stages
    ) -> None:
        self._launch(best_kernel, (*best, *out), best[1], stages, max(32, next_power_of_2(best[1].numel()) // 4))

    def _sum(self, partial: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
        part, result = partial.view(-1), out.view(-1)
        most = self._most(part)
        for begin in range(0, part.numel(), most):
            piece = slice(begin, begin + most)
            two_shot = two_shot_pays(self.rank.count, part[piece].numel() * part.element_size())
            added = residual.view(-1)[piece] if residual is not None else None
            self.sum_stages(part[piece], added, result[piece], ALL_STAGES, two_shot)

    def _most(self, part: torch.Tensor) -> int:
        """Elements that one call carries, whatever its tiles."""
        return self._group.region_bytes // part.element_size() * self._group.channels

    def _launch(
        self,
        kernel: Any,
        tensors: tuple[torch.Tensor, ...],
        part: torch.Tensor,
        stages: Stages,
        block: int,
        **others: int,
    ) -> None:
        """`part` gives dtype and count of what is shown."""
        group, own = self._group, self._own
        kernel[(min(group.channels, -(-part.numel() // block)),)](
            *tensors,
            own=own.buffer.view(part.dtype),
            buffers=tuple(memory.buffer.view(part.dtype) for memory in group.memories),
            own_flags=own.flags,
            flags=tuple(memory.flags for memory in group.memories),
            epochs=own.epochs,
            control=own.control,
            failures=group.failures[self.rank.index],
            rank=self.rank.index,
            count=part.numel(),
            channels=group.channels,
            region=group.region_bytes // part.element_size(),
            RANKS=self.rank.count,
            BLOCK=block,
            CLOCK=part.is_cuda,
            FIRST=stages[0],
            LAST=stages[1],
            num_warps=4 if block <= _BLOCKS[0] else 8,
            **others,
        )


def _block(count: int, channels: int) -> int:
    """The smallest tile with which every element has its own program, or the largest."""
    return next((block for block in _BLOCKS if block * channels >= count), _BLOCKS[-1])


def _region_bytes(sizes: Sizes, ranks: int, channels: int) -> int:
    """Of one channel in one half: whole tiles of the largest elements, and a part of one row of logits at least."""
    size = sizes.dtype.itemsize
    wanted = min(max(sizes.rows * sizes.width, sizes.logit_rows * sizes.vocab_size // ranks) * size, _MOST_HALF_BYTES)
    wanted = max(wanted, sizes.vocab_size // ranks * size)
    tile = _BLOCKS[-1] * torch.int64.itemsize
    return -(-wanted // (channels * tile)) * tile


def _patience(seconds: float, device: torch.device) -> int:
    """In the kernels' unit: ns, or polls where there is no clock."""
    return round(seconds * _NS) if device.type == "cuda" else round(seconds)
