"""A feature of the sampler: tokens further than n standard deviations below the best are taken out of the draw."""

from __future__ import annotations

import torch

from ..rows.state import SlotState


def keep_near(scaled: torch.Tensor, rows: torch.Tensor, state: SlotState) -> torch.Tensor:
    """0 keeps all."""
    n = state.top_n_sigma[rows][:, None]
    floor = scaled.amax(dim=-1, keepdim=True) - n * scaled.std(dim=-1, keepdim=True)
    return scaled.masked_fill((n > 0) & (scaled < floor), float("-inf"))
