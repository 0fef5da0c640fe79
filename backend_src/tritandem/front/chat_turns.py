"""Chat answers that are read: calls of functions and thoughts in the shape of /v1/chat/completions. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tritandem_client import TokenLogprob

from .chat import ChatShape
from .formats.text import Reading, Said, Text, Thought
from .formats.turn import Begun, MadeCall, Told, Turn

_SHAPE = ChatShape()


class ChatTurns:
    """How each answer of a request is read."""

    def __init__(self, grammar: Callable[[Text], Reading[None]], parallel: bool) -> None:
        self._grammar, self._parallel = grammar, parallel

    def open(self) -> Turn:
        return Turn(self._grammar, self._parallel)

    def choices(
        self, index: int, parts: Sequence[Told], logprobs: Sequence[TokenLogprob] | None, top: int
    ) -> list[dict[str, Any]]:
        """One for an event each. `index`: of the choice. Log-probabilities go with the first."""
        deltas = [_delta(part) for part in parts] or ([{"content": ""}] if logprobs else [])
        made = []
        for delta in deltas:
            made.append({**_SHAPE.piece(index, "", logprobs or None, top, 0), "delta": delta})
            logprobs = None
        return made

    def ending(self, index: int, turn: Turn, reason: str) -> dict[str, Any]:
        return _SHAPE.ending(index, ended(turn, reason))

    def whole(
        self, index: int, text: str, reason: str, logprobs: Sequence[TokenLogprob] | None, top: int
    ) -> dict[str, Any]:
        turn = self.open().read(text)
        choice = _SHAPE.whole(index, turn.said, ended(turn, reason), logprobs, top, 0)
        message = choice["message"]
        if turn.thought:
            message["reasoning_content"] = turn.thought
        if turn.calls:
            message["content"] = turn.said or None
            message["tool_calls"] = [_call(call) for call in turn.calls]
        return choice


def ended(turn: Turn, reason: str) -> str:
    """An answer that was cut off is not one that waits for its calls."""
    return "tool_calls" if turn.calls and reason == "stop" else reason


def _delta(part: Told) -> dict[str, Any]:
    if isinstance(part, Said):
        return {"content": part.text}
    if isinstance(part, Thought):
        return {"reasoning_content": part.text}
    if isinstance(part, Begun):
        return {"tool_calls": [{"index": part.number, **_call(part.call), "function": _function(part.call.name, "")}]}
    return {"tool_calls": [{"index": part.number, "function": {"arguments": part.text}}]}


def _call(call: MadeCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": _function(call.name, call.arguments)}


def _function(name: str, arguments: str) -> dict[str, str]:
    return {"name": name, "arguments": arguments}
