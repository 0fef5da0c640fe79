"""The shape of /v1/completions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tritandem_client import TokenLogprob

from .fields import COMPLETIONS


class CompletionShape:
    door, id_prefix = COMPLETIONS, "cmpl-"
    kind = event_kind = "text_completion"

    def opening(self, index: int) -> dict[str, Any] | None:
        return None

    def piece(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, top: int, offset: int
    ) -> dict[str, Any]:
        said = None if logprobs is None else _logprobs(logprobs, top, offset)
        return {"index": index, "text": text, "logprobs": said, "finish_reason": None}

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def whole(
        self, index: int, text: str, reason: str, logprobs: Sequence[TokenLogprob] | None, top: int, offset: int
    ) -> dict[str, Any]:
        return {**self.piece(index, text, logprobs, top, offset), "finish_reason": reason}


def _logprobs(tokens: Sequence[TokenLogprob], top: int, offset: int) -> dict[str, Any]:
    offsets = []
    for one in tokens:
        offsets.append(offset)
        offset += len(one.text)
    return {
        "tokens": [one.text for one in tokens],
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": [_top(one, top) for one in tokens] if top else None,
        "text_offset": offsets,
    }


def _top(one: TokenLogprob, top: int) -> dict[str, float]:
    """By text, as this shape has it; of alternatives that read alike the likeliest is kept."""
    pairs = zip(one.top_texts[:top], (logprob for _, logprob in one.top[:top]), strict=True)
    return dict(reversed(list(pairs)))
