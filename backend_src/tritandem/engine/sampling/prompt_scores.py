"""How likely a model finds the tokens of a prompt itself: which rows of logits that takes, and what is made of them.

Torch on the device of the logits; only `host_scores` reads what a device wrote. Log-probabilities are those of the raw
logits, as the sampler's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ...contracts.arrays import Int32Array
from ...contracts.stream import TokenScores
from ..step import PrefillChunk

ROWS_AT_ONCE = 64  # in float32; a vocabulary is long
_Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # as of `score_tokens`


def scored_rows(chunks: Sequence[PrefillChunk], device: torch.device | str) -> torch.Tensor:
    """int64 [T]: packed indices of the tokens whose logits score the chunks' targets, chunk by chunk."""
    parts, first = [torch.empty(0, dtype=torch.int64, device=device)], 0
    for chunk in chunks:
        if chunk.targets is not None:
            parts.append(torch.arange(first, first + len(chunk.targets), device=device))
        first += len(chunk.ids)
    return torch.cat(parts)


def score_chunks(
    chunks: Sequence[PrefillChunk], logits: torch.Tensor, bring: Callable[[Int32Array], torch.Tensor]
) -> Iterator[_Scores]:
    """Of each chunk with targets, from the logits [T, V] of `scored_rows`. `bring` puts an array beside the logits."""
    first = 0
    for chunk in chunks:
        if chunk.targets is not None:
            targets = bring(chunk.targets).long()
            yield score_tokens(logits[first : first + len(targets)], targets, chunk.alternatives)
            first += len(targets)


def score_tokens(logits: torch.Tensor, targets: torch.Tensor, alternatives: int) -> _Scores:
    """Log-probabilities of `targets` (int64 [T]) by `logits` [T, V]: float32 [T]; ids (int32 [T, K]) and
    log-probabilities (float32 [T, K]) of the likeliest, K the `alternatives` or as many as there are."""
    width = min(alternatives, logits.shape[1])
    empty = logits.new_empty((0, width), dtype=torch.float32)
    parts = [(empty.new_empty(0), empty.to(torch.int32), empty)]
    for start in range(0, len(targets), ROWS_AT_ONCE):
        rows = logits[start : start + ROWS_AT_ONCE].float()
        chosen = rows.gather(1, targets[start : start + ROWS_AT_ONCE, None])[:, 0]
        total, top = rows.logsumexp(dim=1), rows.topk(width, dim=1)
        parts.append((chosen - total, top.indices.to(torch.int32), top.values - total[:, None]))
    logprobs, ids, values = (torch.cat(column) for column in zip(*parts, strict=True))
    return logprobs, ids, values


def host_scores(logprobs: torch.Tensor, top_ids: torch.Tensor, top_logprobs: torch.Tensor) -> TokenScores:
    """Of tensors in host memory, which must not change any more."""
    return TokenScores(logprobs.numpy(), top_ids.numpy(), top_logprobs.numpy())
