"""The shape of /v1/completions. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def with_prompt(said: Mapping[str, Any] | None, prompt: Sequence[TokenLogprob], echo: str, top: int) -> dict[str, Any]:
    """`said` of the answer, behind what is said of the prompt, which reads `echo`. Of its first token nothing is known;
    one that `echo` does not show, or of which it shows a character's part, begins where the next one does."""
    offsets, at, pending = [], 0, 0
    for one in prompt:
        found = -1 if "\ufffd" in one.text else echo.find(one.text, at, at + pending + len(one.text))
        offsets.append(at if found < 0 else found)
        pending = pending + len(one.text) if found < 0 else 0
        at = at if found < 0 else found + len(one.text)
    scored = _logprobs(prompt, top, 0) | {"text_offset": offsets}
    if top and prompt:
        scored["top_logprobs"][0] = None
    return {name: values and values + (said[name] if said else []) for name, values in scored.items()}


def scores_of_prompt(prompt: Sequence[TokenLogprob]) -> list[dict[str, dict[str, Any]] | None]:
    """As vLLM tells them: by id; nothing of the first."""
    scored: list[dict[str, dict[str, Any]] | None] = []
    for one in prompt:
        told = {
            str(token): {"logprob": logprob, "rank": rank, "decoded_token": text}
            for rank, ((token, logprob), text) in enumerate(zip(one.top, one.top_texts, strict=True), start=1)
        }
        scored.append(told or None)
    return scored


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
