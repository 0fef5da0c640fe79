"""Only the tokens that a request allows."""

from __future__ import annotations

import torch

from ..rows.state import SlotState


def keep_allowed(scores: torch.Tensor, rows: torch.Tensor, state: SlotState) -> torch.Tensor:
    """Scores with -inf beside the allowed ids, in rows that have some. What is not a number stays that."""
    limit = torch.full_like(scores, float("-inf")).scatter(1, state.allowed_ids[rows], float("inf"))
    limit = limit.masked_fill((state.allowed_count[rows] == 0)[:, None], float("inf"))
    return torch.minimum(scores, limit)
