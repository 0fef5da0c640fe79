"""The shape of /v1/chat/completions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tritandem_client import TokenLogprob

from .fields import CHAT


class ChatShape:
    door, id_prefix = CHAT, "chatcmpl-"
    kind, event_kind = "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> dict[str, Any] | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}

    def piece(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, top: int, offset: int
    ) -> dict[str, Any]:
        part: dict[str, Any] = {"index": index, "delta": {"content": text}, "finish_reason": None}
        if logprobs is not None:
            part["logprobs"] = _logprobs(logprobs, top)
        return part

    def ending(self, index: int, reason: str) -> dict[str, Any]:
        return {"index": index, "delta": {}, "finish_reason": reason}

    def whole(
        self, index: int, text: str, reason: str, logprobs: Sequence[TokenLogprob] | None, top: int, offset: int
    ) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if logprobs is None else _logprobs(logprobs, top),
            "finish_reason": reason,
        }


def _logprobs(tokens: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    content = []
    for one in tokens:
        likeliest = zip(one.top_texts[:top], one.top[:top], strict=True)
        others = [_token(text, logprob) for text, (_, logprob) in likeliest]
        content.append({**_token(one.text, one.logprob), "top_logprobs": others})
    return {"content": content, "refusal": None}


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    """The bytes of a token that holds a part of a character are not known."""
    return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}
