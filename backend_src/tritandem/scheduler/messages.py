"""What the scheduling thread is told by others: its only inputs beside the clock. Each message names its sender.

Engines are named, not referred to: a message outlives nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from ..contracts.errors import TritandemError
from .ticket import Ticket


@dataclass(frozen=True, slots=True)
class Arrived:
    """From `submit`."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Ended:
    """From whoever ended it first: reader, stop, cancel watch, this thread."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class FirstToken:
    """From an engine's reader: the request's prefill is over."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class Refused:
    """From an engine's caller: it did not take this one of a submit."""

    engine: str
    ticket: Ticket
    error: TritandemError


@dataclass(frozen=True, slots=True)
class EngineUp:
    engine: str


@dataclass(frozen=True, slots=True)
class EngineDown:
    engine: str
    error: Exception


@dataclass(frozen=True, slots=True)
class DrainBegun:
    """From `drain` and `close`: no new requests."""


@dataclass(frozen=True, slots=True)
class Asked:
    """From a thread that waits for `answer`: what was told before is done, and the books agree with `open_tickets`
    (by number; None: no matter)."""

    answer: Future[None]
    open_tickets: Mapping[int, Ticket] | None = None


Message: TypeAlias = Arrived | Ended | FirstToken | Refused | EngineUp | EngineDown | DrainBegun | Asked
Tell: TypeAlias = Callable[[Message], None]
