"""Random numbers of a draw: a pure function of (seed, output index, token id), so that a request's text never depends
on what else is in the batch."""

from __future__ import annotations

import torch

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, odd, as int64: the increment of splitmix64
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


def gumbel_noise(seed: torch.Tensor, index: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Gumbel noise float32 [R, V], a pure function of (seed, index, token id).

    The hash is splitmix64's finaliser (Steele, Lea, Flood 2014) on a per-row key; adding such noise to
    scores and taking the maximum draws from their softmax (Gumbel 1954).
    """
    key = mix64(mix64(seed.to(torch.int64) + _GOLDEN) + index.to(torch.int64))
    ids = torch.arange(vocab_size, dtype=torch.int64, device=seed.device)
    bits = mix64(key[:, None] + ids * _GOLDEN)
    # 23 bits: the largest value, 1 - 2^-24, is still below 1 in float32.
    uniform = ((bits >> 41) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def mix64(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser on int64 (wrapping); shifts are made logical by masking."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)
