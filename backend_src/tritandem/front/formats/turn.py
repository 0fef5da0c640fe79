"""One answer, read by its format as it comes. Belongs to one answer; pure."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .text import Call, Part, Reading, Said, Text, Thought

_ID_CHARS = string.ascii_letters + string.digits
ID_CHARS = 9  # what Mistral's templates want


def new_call_id() -> str:
    return "".join(secrets.choice(_ID_CHARS) for _ in range(ID_CHARS))


@dataclass(slots=True)
class MadeCall:
    name: str
    arguments: str = ""
    id: str = field(default_factory=new_call_id)


class Begun(NamedTuple):
    """The call `number`, from 0, has begun, still without arguments."""

    number: int
    call: MadeCall


class More(NamedTuple):
    """More of its arguments."""

    number: int
    text: str


Told = Said | Thought | Begun | More


class Turn:
    """What was said, thought and called so far. `parallel` false: further calls than the first are left out."""

    def __init__(self, grammar: Callable[[Text], Reading[None]], parallel: bool = True) -> None:
        self._text = Text()
        self._reading = grammar(self._text)
        self._parallel = parallel
        self.calls: list[MadeCall] = []
        self._said: list[str] = []
        self._thought: list[str] = []
        self._leaving_out = False
        self._go_on()

    @property
    def said(self) -> str:
        return "".join(self._said)

    @property
    def thought(self) -> str:
        return "".join(self._thought)

    def feed(self, text: str) -> list[Told]:
        """What this adds."""
        self._text.left += text
        return self._go_on()

    def end(self) -> list[Told]:
        """What had waited for more. Once."""
        self._text.ended = True
        return self._go_on()

    def read(self, text: str) -> Turn:
        """All of an answer."""
        self.feed(text)
        self.end()
        return self

    def _go_on(self) -> list[Told]:
        if next(self._reading, self) is self:  # it has come to its end, and so has the text
            self._text.close()
        parts, self._text.parts = self._text.parts, []
        return [told for part in parts if (told := self._keep(part)) is not None]

    def _keep(self, part: Part) -> Told | None:
        if isinstance(part, Said):
            self._said.append(part.text)
            return part
        if isinstance(part, Thought):
            self._thought.append(part.text)
            return part
        if isinstance(part, Call):
            self._leaving_out = bool(self.calls) and not self._parallel
        if self._leaving_out:
            return None
        if isinstance(part, Call):
            self.calls.append(MadeCall(part.name))
            return Begun(len(self.calls) - 1, self.calls[-1])
        self.calls[-1].arguments += part.text
        return More(len(self.calls) - 1, part.text)
