"""What every transport takes and gives back: a request that is ready to travel, and the raw messages that came.

Transports stamp messages as they are read and do not look into them; decoding happens after the stream has ended.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Call:
    """One generation request before encoding. `options`: see `dialects.Dialect`; `messages` only for chats."""

    request_id: str
    prompt: str
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    messages: tuple[tuple[str, str], ...] = ()  # (role, text)


@dataclass(slots=True)
class Exchange:
    """What one stream did. `messages`: (monotonic ns, payload), one for each response, in order of arrival."""

    sent_ns: int = 0
    end_ns: int = 0
    messages: list[tuple[int, bytes]] = field(default_factory=list)
    outcome: str = ""  # set when the transport itself failed: TIMEOUT, UNREACHABLE, or a server's word
    error: str = ""


@dataclass(slots=True)
class Decoded:
    """The meaning of the messages of one stream; `tokens` has one entry for each message with new tokens."""

    arrived_ns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    input_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    server: dict[str, float] = field(default_factory=dict)


class Transport(Protocol):
    """One per process, shared by its greenlets."""

    def open(self) -> None:
        """Connect ahead of the run, so that no request pays for it. A missing server fails requests, not this."""

    def exchange(self, call: Call, timeout_s: float) -> Exchange:
        """Send and block the calling greenlet until the stream has ended. Never raises for a failed request."""

    def decode(self, exchange: Exchange) -> Decoded:
        """Read the messages of a finished exchange."""

    def close(self) -> None:
        """Close every connection."""
