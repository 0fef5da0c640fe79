"""No end token before `min_tokens`."""

from __future__ import annotations

import torch

from ..rows.state import SlotState
from .forbid import forbid


def mask_end_tokens(scores: torch.Tensor, rows: torch.Tensor, state: SlotState) -> torch.Tensor:
    """Forbid stop ids while a row has produced fewer than its min_tokens."""
    early = (state.produced[rows] < state.min_tokens[rows])[:, None]
    stop_ids = state.stop_ids[rows].long()
    return forbid(scores, stop_ids.clamp(min=0), early & (stop_ids >= 0))
