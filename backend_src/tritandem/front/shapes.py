"""The shape of one endpoint's answer: what chat and completions have in common. Pure.

An answer is made of choices; a stream of events, each of which carries parts of choices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from tritandem_client import Choice, Chunk, Result, TokenLogprob

# The engine's words for an end that has none of OpenAI's: somebody stopped the answer by its id.
_REASONS = {"stop": "stop", "length": "length", "cancelled": "stop"}
DONE = b"data: [DONE]\n\n"
_compact = json.JSONEncoder(separators=(",", ":")).encode


class Shape(Protocol):
    """`index`: of the choice. Each method makes one element of `choices`."""

    door: str
    id_prefix: str
    kind: str  # `object` of a whole answer
    event_kind: str  # and of an event

    def opening(self, index: int) -> dict[str, Any] | None:
        """What an answer begins with, before any text; None: nothing."""

    def piece(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] | None, top: int, offset: int
    ) -> dict[str, Any]:
        """`offset`: characters of this choice before `text`. `logprobs`: None unless they were asked for."""

    def ending(self, index: int, reason: str) -> dict[str, Any]: ...

    def whole(
        self, index: int, text: str, reason: str, logprobs: Sequence[TokenLogprob] | None, top: int, offset: int
    ) -> dict[str, Any]: ...


def finish_reason(said: str | None) -> str:
    """OpenAI's word."""
    return _REASONS.get(said or "", "stop")


def stop_reason(said: Chunk | Choice | Result) -> dict[str, Any]:
    """What of the request's own stop words and ids ended the answer: a member of vLLM's, left out where none did."""
    return {} if said.stop_reason is None else {"stop_reason": said.stop_reason}


def usage(results: Sequence[Result]) -> dict[str, Any]:
    """Of all choices; a prompt that is answered n times counts once."""
    prompt = sum(result.num_input_tokens for result in results)
    answer = sum(result.num_output_tokens for result in results)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in results)},
    }


class Envelope:
    """What stands around the choices: the same in every event of a request, so it is written once."""

    def __init__(self, shape: Shape, request_id: str, model: str, created_unix_s: int) -> None:
        self._head = {"id": request_id, "created": created_unix_s, "model": model}
        self._kind = shape.kind
        around = _compact({**self._head, "object": shape.event_kind, "choices": None})
        self._before = "data: " + around[: -len("null}")]

    def event(self, choices: Sequence[dict[str, Any]], more: str = "") -> bytes:
        """One server-sent event. `more`: further members, as JSON text after a comma."""
        return f"{self._before}{_compact(choices)}{more}}}\n\n".encode()

    def usage_event(self, counts: dict[str, Any]) -> bytes:
        return self.event((), f',"usage":{_compact(counts)}')

    def document(self, choices: Sequence[dict[str, Any]], counts: dict[str, Any]) -> bytes:
        return _compact({**self._head, "object": self._kind, "choices": choices, "usage": counts}).encode()
