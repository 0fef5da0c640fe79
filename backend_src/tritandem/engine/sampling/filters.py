"""top_k, top_p and min_p: the unlikely tokens are taken out of the draw."""

from __future__ import annotations

import torch

from ..rows.state import SlotState


def filter_draw(scaled: torch.Tensor, rows: torch.Tensor, state: SlotState) -> torch.Tensor:
    """`keep_likely` by what each row asks for."""
    return keep_likely(scaled, state.top_k[rows], state.top_p[rows], state.min_p[rows])


def keep_likely(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Scores with -inf outside the top_k, then the top_p nucleus of those, then min_p of the maximum.

    Instead of sorting the vocabulary, the cut is found by bisection over the scores' bit patterns: exact,
    and tokens that tie with the last one kept are kept.
    """
    vocab_size = scaled.shape[1]
    keys = ordered_keys(scaled)
    k = torch.where(top_k > 0, top_k, vocab_size).to(torch.float32)
    kept = keys >= largest_key_reaching(keys, torch.ones_like(scaled), k)[:, None]
    probs = scaled.masked_fill(~kept, float("-inf")).softmax(dim=-1)
    # Sums are rounded: a nucleus of 1 must keep everything.
    nucleus = largest_key_reaching(keys, probs, top_p)
    kept &= (keys >= nucleus[:, None]) | (top_p >= 1)[:, None]
    kept &= probs >= min_p[:, None] * probs.amax(dim=-1, keepdim=True)
    return scaled.masked_fill(~kept, float("-inf"))


def ordered_keys(values: torch.Tensor) -> torch.Tensor:
    """float32 to int32 keys in the same order."""
    bits = values.contiguous().view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def largest_key_reaching(keys: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The largest t (int32 [R]) with sum(weights[keys >= t]) >= target, by 32 halvings; the least key if none."""
    low = torch.full_like(target, -(2**31), dtype=torch.int64)
    high = torch.full_like(target, 2**31, dtype=torch.int64)  # never reaches, unless everything does
    for _ in range(32):
        middle = (low + high) >> 1
        reached = (weights * (keys >= middle[:, None])).sum(dim=-1) >= target
        low, high = torch.where(reached, middle, low), torch.where(reached, high, middle)
    return low.to(torch.int32)
