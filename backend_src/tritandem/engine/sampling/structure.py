"""Only what the structure of an answer allows next, as the host's mask says."""

from __future__ import annotations

import torch

from ..rows.state import SlotState
from ..step import MASKED


def keep_structure(logits: torch.Tensor, rows: torch.Tensor, state: SlotState) -> torch.Tensor:
    """Logits with -inf wherever a MASKED row's mask has no bit; other rows as they are. On the CPU, where the masks
    lie; `rows/mask_kernels.py` has the fast twin."""
    masked = (state.structure[rows] == MASKED)[:, None]
    ids = torch.arange(logits.shape[1])
    bits = (state.masks[rows][:, ids >> 5] >> (ids & 31)) & 1
    return logits.masked_fill(masked & (bits == 0), float("-inf"))
