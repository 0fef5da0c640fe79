"""An engine that only counts, whose token j of every answer is the same: a text out of order or with a gap shows."""

from __future__ import annotations

import dataclasses

import numpy as np
from free_running_engine import FIRST_ID, FreeRunningService
from tritandem.contracts.stream import TokenBatch


class NumberedService(FreeRunningService):
    def __init__(self, step_s: float) -> None:
        super().__init__(step_s)
        self._made: dict[int, int] = {}

    def _take(self, steps: int) -> TokenBatch:
        batch = super()._take(steps)
        tokens = []
        for seq_id, count in zip(batch.seq_ids.tolist(), batch.token_counts.tolist(), strict=True):
            made = self._made.get(seq_id, 0)
            tokens.append(np.arange(FIRST_ID + made, FIRST_ID + made + count, dtype=np.int32))
            self._made[seq_id] = made + count
        return dataclasses.replace(batch, tokens=np.concatenate(tokens))
