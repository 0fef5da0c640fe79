"""Words that must not appear: their last token is forbidden where the others stand already."""

from __future__ import annotations

import torch

from ..rows.layout import RECENT_TOKENS
from ..rows.state import SlotState
from .forbid import forbid


def mask_bad_words(scores: torch.Tensor, rows: torch.Tensor, state: SlotState) -> torch.Tensor:
    """Forbid the last token of a bad word whose other tokens are the row's latest ones."""
    words = state.bad_words[rows]  # [R, W, L]; behind the row's own stand those of an earlier owner
    own = torch.arange(words.shape[1], device=words.device) < state.bad_word_count[rows][:, None]
    heads, last = words[:, :, :RECENT_TOKENS], words[:, :, RECENT_TOKENS]
    reached = ((heads == state.recent[rows][:, None]) | (heads < 0)).all(dim=-1) & own
    return forbid(scores, last.clamp(min=0).long(), reached)
