"""Logits to tokens: the order in which the features of this folder apply.

Pure torch on fixed shapes without host synchronisation, so it runs on the CPU and inside a CUDA graph.
Reads slot rows, changes none. Knows nothing about sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..rows.state import SlotState
from ..step import SamplingFeatures
from .bad_words import mask_bad_words
from .end_tokens import mask_end_tokens
from .filters import keep_likely
from .noise import gumbel_noise
from .penalties import penalise


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
