"""Only what the structure of an answer allows next, as the host's mask or the row's table says. On the CPU;
`rows/mask_kernels.py` has the fast twins."""

from __future__ import annotations

import torch

from ..rows.state import SlotState
from ..step import MASKED

_FORBIDDEN = 255


def keep_masked(logits: torch.Tensor, rows: torch.Tensor, state: SlotState) -> torch.Tensor:
    """Logits with -inf wherever a MASKED row's mask has no bit; other rows as they are."""
    masked = (state.structure[rows] == MASKED)[:, None]
    ids = torch.arange(logits.shape[1])
    bits = (state.masks[rows][:, ids >> 5] >> (ids & 31)) & 1
    return logits.masked_fill(masked & (bits == 0), float("-inf"))


def keep_tabled(logits: torch.Tensor, rows: torch.Tensor, state: SlotState) -> torch.Tensor:
    """Logits with -inf wherever a row's table has no next state; rows without a table as they are."""
    tabled, classes, moves = state.table_rows(rows)
    forbidden = moves.gather(1, classes.long()) == _FORBIDDEN
    return logits.masked_fill(tabled[:, None] & forbidden, float("-inf"))
