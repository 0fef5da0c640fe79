"""Scores of tokens that were seen before, changed by the request's penalties."""

from __future__ import annotations

import torch

from ..rows.state import SlotState


def penalise(scores: torch.Tensor, rows: torch.Tensor, state: SlotState) -> torch.Tensor:
    """Repetition penalty as transformers defines it (prompt and output: divide a positive score, multiply
    a negative one), presence and frequency as the OpenAI API does (output only: subtract)."""
    tables = state.ensure_penalties()
    counts = tables.output_counts[rows]
    factor = torch.where(tables.seen[rows], state.repetition_penalty[rows][:, None], 1.0)
    scores = torch.where(scores > 0, scores / factor, scores * factor)
    presence, frequency = state.presence_penalty[rows], state.frequency_penalty[rows]
    return scores - counts * frequency[:, None] - (counts > 0) * presence[:, None]
