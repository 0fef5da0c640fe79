"""Logits to tokens: penalties, bans, filters, counter-based random numbers, log-probabilities.

Pure torch on fixed shapes without host synchronisation, so it runs on the CPU and inside a CUDA graph.
Reads slot rows, changes none. Knows nothing about sequences. Randomness depends on (seed, output index,
token id) alone, so a request's text never depends on what else is in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..rows.state import RECENT_TOKENS, SlotState
from ..step import SamplingFeatures

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, odd, as int64: the increment of splitmix64
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


@dataclass(frozen=True, slots=True)
class Sampled:
    """R rows. Log-probabilities are log-softmax of the raw logits, before penalties and temperature."""

    tokens: torch.Tensor  # int64 [R]
    broken: torch.Tensor  # bool [R] no token can be chosen: its score is not finite
    logprobs: torch.Tensor | None  # float32 [R]
    top_ids: torch.Tensor | None  # int32 [R, K], most likely first
    top_logprobs: torch.Tensor | None  # float32 [R, K]


def sample(logits: torch.Tensor, rows: torch.Tensor, state: SlotState, features: SamplingFeatures) -> Sampled:
    """The next token of each row. `logits`: float32 [R, V] (not changed), `rows`: int64 [R] slots."""
    scores = logits
    if features.penalised:
        scores = penalise(scores, rows, state)
    scores = mask_end_tokens(scores, rows, state)
    if features.bad_words:
        scores = mask_bad_words(scores, rows, state)
    score, tokens = scores.max(dim=-1)
    if features.sampled:
        temperature = state.temperature[rows]
        scaled = scores / temperature.clamp(min=1e-6)[:, None]
        if features.filtered:
            scaled = keep_likely(scaled, state.top_k[rows], state.top_p[rows], state.min_p[rows])
        drawn = (scaled + gumbel_noise(state.seed[rows], state.produced[rows], logits.shape[1])).max(dim=-1)
        tokens = torch.where(temperature > 0, drawn.indices, tokens)
        score = torch.where(temperature > 0, drawn.values, score)
    broken = ~torch.isfinite(score)
    if features.top_logprobs < 0:
        return Sampled(tokens, broken, None, None, None)
    all_logprobs = logits.log_softmax(dim=-1)
    chosen = all_logprobs.gather(1, tokens[:, None])[:, 0]
    if features.top_logprobs == 0:
        return Sampled(tokens, broken, chosen, None, None)
    top = all_logprobs.topk(min(features.top_logprobs, logits.shape[1]), dim=-1)
    return Sampled(tokens, broken, chosen, top.indices.to(torch.int32), top.values)


def penalise(scores: torch.Tensor, rows: torch.Tensor, state: SlotState) -> torch.Tensor:
    """Repetition penalty as transformers defines it (prompt and output: divide a positive score, multiply
    a negative one), presence and frequency as the OpenAI API does (output only: subtract)."""
    tables = state.ensure_penalties()
    counts = tables.output_counts[rows]
    factor = torch.where(tables.seen[rows], state.repetition_penalty[rows][:, None], 1.0)
    scores = torch.where(scores > 0, scores / factor, scores * factor)
    presence, frequency = state.presence_penalty[rows], state.frequency_penalty[rows]
    return scores - counts * frequency[:, None] - (counts > 0) * presence[:, None]


def mask_end_tokens(scores: torch.Tensor, rows: torch.Tensor, state: SlotState) -> torch.Tensor:
    """Forbid stop ids while a row has produced fewer than its min_tokens."""
    early = (state.produced[rows] < state.min_tokens[rows])[:, None]
    stop_ids = state.stop_ids[rows]
    return forbid(scores, stop_ids.clamp(min=0), early & (stop_ids >= 0))


def mask_bad_words(scores: torch.Tensor, rows: torch.Tensor, state: SlotState) -> torch.Tensor:
    """Forbid the last token of a bad word whose other tokens are the row's latest ones."""
    words = state.bad_words[rows]  # [R, W, L]
    heads, last = words[:, :, :RECENT_TOKENS], words[:, :, RECENT_TOKENS]
    reached = ((heads == state.recent[rows][:, None]) | (heads < 0)).all(dim=-1) & (last >= 0)
    return forbid(scores, last.clamp(min=0), reached)


def forbid(scores: torch.Tensor, ids: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
    """Scores with -inf at `ids` [R, K] where `condition` [R, K] holds."""
    limit = torch.where(condition, float("-inf"), float("inf")).to(scores.dtype)
    return scores.scatter_reduce(1, ids, limit, reduce="amin")


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
