"""Tokens taken out of the choice: what several features share."""

from __future__ import annotations

import torch


def forbid(scores: torch.Tensor, ids: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
    """Scores with -inf at `ids` [R, K] where `condition` [R, K] holds."""
    limit = torch.where(condition, float("-inf"), float("inf")).to(scores.dtype)
    return scores.scatter_reduce(1, ids, limit, reduce="amin")
