"""An answer told in blocks: what /v1/responses and /v1/messages have in common, as events and as one document. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from tritandem_client import Result

from .ask import Ask
from .errors import ApiError, invalid, not_honoured
from .formats.text import Said, Thought
from .formats.turn import Begun, MadeCall, More, Told

Event = dict[str, Any]  # `type` is its name


class Narrator(Protocol):
    """Tells one answer. Each method gives the events of what happened; `document` is the whole answer afterwards."""

    def begin(self) -> Iterator[Event]: ...

    def open_text(self, thought: bool) -> Iterator[Event]: ...

    def text(self, text: str, thought: bool) -> Iterator[Event]: ...

    def close_text(self, text: str, thought: bool) -> Iterator[Event]: ...

    def open_call(self, call: MadeCall) -> Iterator[Event]: ...

    def arguments(self, text: str) -> Iterator[Event]: ...

    def close_call(self, call: MadeCall) -> Iterator[Event]: ...

    def end(self, reason: str, result: Result, called: bool) -> Iterator[Event]:
        """`reason`: stop or length."""

    def document(self) -> dict[str, Any]: ...


class Endpoint(Protocol):
    """One way of asking for a turn of a conversation and of telling it."""

    id_prefix: str

    def to_chat(self, document: dict[str, Any]) -> dict[str, Any]:
        """The body as one of /v1/chat/completions. Raises ApiError naming a field of the former."""

    def param(self, name: str) -> str:
        """What a field of the chat is called here."""

    def narrator(self, document: dict[str, Any], ask: Ask, request_id: str, model: str, now_s: int) -> Narrator: ...

    def error(self, error: ApiError, request_id: str) -> bytes:
        """The body of a response."""

    def error_event(self, error: ApiError, request_id: str) -> Event: ...


class Telling:
    """Turns what is said, thought and called into blocks, one after the other."""

    def __init__(self, narrator: Narrator) -> None:
        self._narrator = narrator
        self._open: Said | Thought | MadeCall | None = None

    def tell(self, parts: Sequence[Told]) -> Iterator[Event]:
        for part in parts:
            if isinstance(part, Begun):
                yield from self.close()
                self._open = part.call
                yield from self._narrator.open_call(part.call)
            elif isinstance(part, More):
                yield from self._narrator.arguments(part.text)
            else:
                thought = isinstance(part, Thought)
                if type(self._open) is not type(part):
                    yield from self.close()
                    self._open = type(part)("")
                    yield from self._narrator.open_text(thought)
                assert not isinstance(self._open, MadeCall)
                assert self._open is not None
                self._open = type(part)(self._open.text + part.text)
                yield from self._narrator.text(part.text, thought)

    def close(self) -> Iterator[Event]:
        """The block that is open, if any."""
        before, self._open = self._open, None
        if isinstance(before, MadeCall):
            yield from self._narrator.close_call(before)
        elif before is not None:
            yield from self._narrator.close_text(before.text, isinstance(before, Thought))


def as_bytes(events: Iterator[Event]) -> bytes:
    """Server-sent events with their names."""
    return b"".join(
        f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n".encode() for event in events
    )


def refuse(document: dict[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Takes fields out that say nothing. Raises ApiError for one that would change the answer."""
    for name, values in neutral.items():
        value = document.pop(name, None)
        if value is not None and not any(value == one and type(value) is type(one) for one in values):
            shown = " or ".join(map(json.dumps, values))
            raise not_honoured(name, value, f"{shown or 'nothing'}: it is not offered")


def parts_of(field: str, content: Any, kinds: Sequence[str], first: int = 0) -> list[dict[str, Any]]:
    """Text parts, as a chat has them. `first`: the index of the first. Raises ApiError."""
    if not isinstance(content, list):
        raise invalid(field, content, "a text or a list of parts")
    made = []
    for index, part in enumerate(content, first):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds:
            raise not_honoured(f"{field}[{index}].type", kind, ", ".join(kinds))
        if not isinstance(part.get("text"), str):
            raise invalid(f"{field}[{index}].text", part.get("text"), "a string")
        made.append({"type": "text", "text": part["text"]})
    return made
