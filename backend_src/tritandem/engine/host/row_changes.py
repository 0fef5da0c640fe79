"""Changes to device rows that the next launched step must carry: releases, inits, block table entries.

They stay here until a step that carries them was launched, so that a step that failed loses none; carrying
one twice is harmless. Owned by the core's thread.
"""

from __future__ import annotations

import numpy as np

from ...contracts.arrays import Int32Array
from ..step import SlotInit


class RowChanges:
    def __init__(self) -> None:
        self.releases: list[int] = []
        self.inits: dict[int, SlotInit] = {}
        self._blocks: dict[int, list[tuple[int, int]]] = {}  # slot -> (index in its table, block)

    def init(self, init: SlotInit) -> None:
        self.inits[init.slot] = init

    def add_blocks(self, slot: int, first_index: int, blocks: list[int]) -> None:
        self._blocks.setdefault(slot, []).extend(enumerate(blocks, first_index))

    def release(self, slot: int) -> None:
        """The row idles from the next step on; what was still to be sent for it is void."""
        self.inits.pop(slot, None)
        self._blocks.pop(slot, None)
        self.releases.append(slot)

    def block_updates(self) -> Int32Array | None:
        """[U, 3] slot, index in its block table, block id."""
        rows = [(slot, index, block) for slot, entries in self._blocks.items() for index, block in entries]
        return np.array(rows, np.int32) if rows else None

    def clear(self) -> None:
        self.releases, self.inits, self._blocks = [], {}, {}
