"""Logits to tokens: which features there are, and the order in which they apply.

Pure torch on fixed shapes without host synchronisation, so it runs on the CPU and inside a CUDA graph.
Reads slot rows, changes none. Knows nothing about sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..rows.state import SlotState
from ..step import ALLOWED_TOKENS, BAD_WORDS, LOGIT_BIAS, PENALISED, STRUCTURED, TABLED, SamplingFeatures
from .allowed_tokens import keep_allowed
from .bad_words import mask_bad_words
from .end_tokens import mask_end_tokens
from .filters import filter_draw
from .logit_bias import add_bias
from .noise import gumbel_noise
from .penalties import penalise
from .structure import keep_masked, keep_tabled

# (scores float32 [R, V], rows int64 [R], state) -> scores
Change = Callable[[torch.Tensor, torch.Tensor, SlotState], torch.Tensor]
EVERY = ""  # the name of what applies to every step that is not plainly greedy

# By the name that the table of sampling fields gives a feature, in the order of application: to the logits themselves,
# then to every choice, and then, behind the temperature, to draws.
STRUCTURE: tuple[tuple[str, Change], ...] = ((STRUCTURED, keep_masked), (TABLED, keep_tabled))
CHOICE: tuple[tuple[str, Change], ...] = (
    (LOGIT_BIAS, add_bias),
    (PENALISED, penalise),
    (ALLOWED_TOKENS, keep_allowed),
    (EVERY, mask_end_tokens),
    (BAD_WORDS, mask_bad_words),
)
DRAW: tuple[tuple[str, Change], ...] = (("filtered", filter_draw),)


@dataclass(frozen=True, slots=True)
class Sampled:
    """R rows. Log-probabilities are log-softmax of the raw logits, before bias, penalties and temperature, over what a
    structure allows: as vLLM reports them."""

    tokens: torch.Tensor  # int64 [R]
    broken: torch.Tensor  # bool [R] no token can be chosen: its score is not finite
    logprobs: torch.Tensor | None  # float32 [R]
    top_ids: torch.Tensor | None  # int32 [R, K], most likely first
    top_logprobs: torch.Tensor | None  # float32 [R, K]


def sample(logits: torch.Tensor, rows: torch.Tensor, state: SlotState, features: SamplingFeatures) -> Sampled:
    """The next token of each row. `logits`: float32 [R, V] (not changed), `rows`: int64 [R] slots."""
    asked = features.asked | {EVERY}
    for name, keep in STRUCTURE:
        logits = keep(logits, rows, state) if name in asked else logits
    scores = logits
    for name, change in CHOICE:
        scores = change(scores, rows, state) if name in asked else scores
    score, tokens = scores.max(dim=-1)
    if "sampled" in asked:
        temperature = state.temperature[rows]
        scaled = scores / temperature.clamp(min=1e-6)[:, None]
        for name, change in DRAW:
            scaled = change(scaled, rows, state) if name in asked else scaled
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
