"""What clients get: chunks of text, and where they go.

Tier 0. Times are `time.monotonic_ns()` of this host (CLOCK_MONOTONIC, comparable between its processes).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from .errors import Outcome, TritandemError
from .stream import FinishReason


@dataclass(frozen=True, slots=True)
class Stamps:
    """When each stage of one request was reached, monotonic ns; 0: not reached."""

    received_ns: int = 0
    tokenized_ns: int = 0
    dispatched_ns: int = 0
    accepted_ns: int = 0
    prefill_start_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    first_sent_ns: int = 0
    finished_ns: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log-probability and the asked-for alternatives, most likely first."""

    token_id: int
    logprob: float | None  # None: a prompt's first token has none
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """One response towards a client: the text since the last one, and on the last one how it ended."""

    text: str
    num_output_tokens: int  # of this chunk
    finish_reason: FinishReason | None = None  # set on the last chunk only
    outcome: Outcome | None = None  # set on the last chunk only
    num_input_tokens: int = 0
    cached_tokens: int = 0
    cumulative_logprob: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()
    stamps: Stamps | None = None  # set on the last chunk only
    seed: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None  # set on the first chunk, where asked for
    index: int | None = None  # of the answer, where several were asked for
    choices: tuple[Chunk, ...] = ()  # all of them, where several go out in one response
    stop_reason: str | int | None = None  # of the last chunk: the request's stop word or stop id that ended the answer


class ResponseSink(Protocol):
    """Where the chunks of one request go. Exactly one `finish` or `fail` per request, nothing after it."""

    def send(self, chunk: Chunk) -> None:
        """Deliver a chunk that is not the last; may block for one process round trip."""

    def finish(self, chunk: Chunk) -> None:
        """Deliver the last chunk and end the request in the same response."""

    def fail(self, error: TritandemError) -> None:
        """End the request with an error."""

    def cancelled(self) -> bool:
        """True once the client has gone; one process round trip, so never in a token path."""
