"""What engines say, and how the scheduler reaches one: load, new tokens of many sequences in one message.

Tier 0. Times are `time.monotonic_ns()` of this host (CLOCK_MONOTONIC, comparable between its processes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Protocol

from .arrays import Float32Array, Int32Array, Int64Array, UInt8Array
from .errors import TritandemError
from .requests import EngineRequest


class FinishReason(str, Enum):
    """The public `finish_reason`."""

    STOP = "stop"  # end token, stop token or stop word, or the structure asked for is complete
    LENGTH = "length"  # max_tokens or the context window
    CANCELLED = "cancelled"
    ERROR = "error"


class FinishCode(IntEnum):
    """The engine's word for the state of one sequence after a step (travels as uint8)."""

    RUNNING = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4
    COMPLETE = 5  # the structure asked for is complete; the last token is part of it, no end token

    @property
    def reason(self) -> FinishReason:
        """The public word. Raises KeyError for RUNNING, which is no end."""
        return _REASON_OF_CODE[self]


_REASON_OF_CODE: dict[FinishCode, FinishReason] = {
    FinishCode.STOP: FinishReason.STOP,
    FinishCode.LENGTH: FinishReason.LENGTH,
    FinishCode.CANCELLED: FinishReason.CANCELLED,
    FinishCode.ERROR: FinishReason.ERROR,
    FinishCode.COMPLETE: FinishReason.STOP,
}


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """The engine's state as of one flush; the scheduler decides by it. All fields travel as one int64 row."""

    running: int = 0  # sequences that decode
    waiting: int = 0  # sequences accepted, prefill not finished
    waiting_tokens: int = 0  # prompt tokens not yet prefilled
    free_blocks: int = 0  # blocks that could be allocated now (cached ones that nobody uses included)
    total_blocks: int = 0
    block_tokens: int = 0
    max_sequences: int = 0
    max_context_tokens: int = 0
    decode_step_ns: int = 0  # moving average
    prefill_token_ns: int = 0  # moving average per prompt token
    steps: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Log-probabilities of T given tokens, and of the K likeliest in the place of each, most likely first."""

    logprobs: Float32Array  # [T]
    top_ids: Int32Array  # [T, K]
    top_logprobs: Float32Array  # [T, K]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """One message of an engine's stream: the new tokens of every sequence that has any (or has ended).

    R rows, T tokens in total; the tokens of row i are `tokens[offset : offset + token_counts[i]]` in row
    order. A sequence appears with a finish code other than RUNNING exactly once, in its last row.
    """

    seq_ids: Int64Array  # [R]
    token_counts: Int32Array  # [R]
    tokens: Int32Array  # [T]
    finish: UInt8Array  # [R] FinishCode
    cached_tokens: Int32Array  # [R] prompt tokens found in the prefix cache
    stamps_ns: Int64Array  # [R, 4] accepted, prefill start, first token, latest token; 0: not yet
    load: LoadSnapshot
    logprobs: Float32Array | None = None  # [T] of the chosen tokens, NaN where not asked for
    top_ids: Int32Array | None = None  # [T, K] alternatives, -1 where not asked for
    top_logprobs: Float32Array | None = None  # [T, K]
    errors: dict[int, str] = field(default_factory=dict)  # row -> message, for FinishCode.ERROR
    # row -> scores of the prompt's tokens behind the first; beside the sequence's first token, where asked for
    prompts: dict[int, TokenScores] = field(default_factory=dict)


class EnginePort(Protocol):
    """How the scheduler reaches one engine; implementations live in `triton_io` (BLS) and in tests."""

    name: str

    def submit(self, requests: Sequence[EngineRequest]) -> list[TritandemError | None]:
        """Hand over sequences in one call; one entry each: None, or why that sequence was refused.

        Raises EngineFailed when the engine cannot be reached.
        """

    def cancel(self, seq_ids: Sequence[int]) -> None:
        """Ask for an early end; unknown ids are ignored. Raises EngineFailed when it cannot be reached."""

    def stream(self) -> Iterator[TokenBatch]:
        """The one long-lived stream: ends by itself when the engine has been idle; reopen on demand.

        Raises EngineFailed when the engine dies.
        """

    def load(self) -> LoadSnapshot:
        """The engine's state now (one round trip). Raises EngineFailed when it cannot be reached."""
