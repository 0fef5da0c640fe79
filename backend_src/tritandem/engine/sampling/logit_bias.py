"""Scores of single tokens, moved by what the request says of each."""

from __future__ import annotations

import torch

from ..rows.state import SlotState


def add_bias(scores: torch.Tensor, rows: torch.Tensor, state: SlotState) -> torch.Tensor:
    """Add each row's values to the scores of its ids; where an earlier owner's stand behind them, 0."""
    ids = state.bias_ids[rows]  # [R, B]
    own = torch.arange(ids.shape[1], device=ids.device) < state.bias_count[rows][:, None]
    return scores.scatter_add(1, ids, state.bias_values[rows] * own)
