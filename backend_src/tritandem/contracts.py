"""What the rooms say to each other: requests, sampling parameters, chunks, load; outcomes and errors from `errors`.

Tier 0. Knows nothing about Triton, torch, tokenizer files or threads; arrays are numpy, times are
`time.monotonic_ns()` of this host (CLOCK_MONOTONIC, comparable between its processes).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum, IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError as ConfigError
from .errors import DeadlineExpired as DeadlineExpired
from .errors import Draining as Draining
from .errors import EngineFailed as EngineFailed
from .errors import InvalidRequest as InvalidRequest
from .errors import Outcome as Outcome
from .errors import RequestCancelled as RequestCancelled
from .errors import RequestStopped as RequestStopped
from .errors import Saturated as Saturated
from .errors import TritandemError as TritandemError
from .errors import told as told

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
UInt8Array = NDArray[np.uint8]
Float32Array = NDArray[np.float32]


class FinishReason(str, Enum):
    """The public `finish_reason`."""

    STOP = "stop"  # end token, stop token or stop word
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

    @property
    def reason(self) -> FinishReason:
        """The public word. Raises KeyError for RUNNING, which is no end."""
        return _REASON_OF_CODE[self]


_REASON_OF_CODE: dict[FinishCode, FinishReason] = {
    code: FinishReason[code.name] for code in FinishCode if code is not FinishCode.RUNNING
}


class PriorityClass(IntEnum):
    """Lower runs first."""

    INTERACTIVE = 0
    NORMAL = 1
    BATCH = 2


# --------------------------------------------------------------------------------------------------
# Requests
# --------------------------------------------------------------------------------------------------

MAX_TOP_LOGPROBS = 20
MAX_STOP_TOKEN_IDS = 16
MAX_STOP_WORDS = 64
MAX_BAD_WORDS = 64
MAX_BAD_WORD_TOKENS = 8
MAX_STOP_WORD_CHARS = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Greedy unless `temperature` > 0; defaults change nothing.

    `seed` fixes the random stream of one request: token i depends on (seed, i) only, never on the batch.
    `logprobs` is the number of alternatives reported per token (0: only the chosen one's, None: none).
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0  # a request that samples without one gets a random one where it is decoded, and keeps it
    logprobs: int | None = None

    def __post_init__(self) -> None:
        """Raises InvalidRequest naming the first field out of range."""
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in _SAMPLING_RANGES or value is None:
                continue
            low, high, allowed = _SAMPLING_RANGES[f.name]
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not (number and low <= value <= high):  # a NaN lies in no range
                raise InvalidRequest(f.name, value, allowed)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p", self.top_p, _SAMPLING_RANGES["top_p"][2])
        if self.min_tokens > self.max_tokens:
            raise InvalidRequest("min_tokens", self.min_tokens, f"0..max_tokens ({self.max_tokens})")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_SAMPLING_RANGES: dict[str, tuple[float, float, str]] = {
    "max_tokens": (1, 2**31 - 1, "a whole number of at least 1"),
    "min_tokens": (0, 2**31 - 1, "a whole number of at least 0, at most max_tokens"),
    "temperature": (0.0, 100.0, "a number in [0, 100]; 0 is greedy"),
    "top_k": (0, 2**31 - 1, "a whole number of at least 0; 0 is off"),
    "top_p": (0.0, 1.0, "a number in (0, 1]"),
    "min_p": (0.0, 1.0, "a number in [0, 1]"),
    "repetition_penalty": (0.01, 100.0, "a number in [0.01, 100]; 1 is off"),
    "presence_penalty": (-2.0, 2.0, "a number in [-2, 2]"),
    "frequency_penalty": (-2.0, 2.0, "a number in [-2, 2]"),
    "seed": (0, 2**63 - 1, "a whole number in [0, 2^63 - 1]"),
    "logprobs": (0, MAX_TOP_LOGPROBS, f"a whole number in [0, {MAX_TOP_LOGPROBS}]"),
}


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """What the client wants to see in its responses."""

    stream: bool = False
    exclude_input: bool = True
    finish_reason: bool = True
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    cumulative_logprob: bool = False
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One client request after decoding and validation, before admission. `input_ids`: int32 [n], n >= 1."""

    request_id: str
    input_ids: Int32Array
    sampling: SamplingParams
    prompt_text: str | None = None  # only where the output must repeat it
    stop_words: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()  # token id sequences that must not appear
    output: OutputOptions = OutputOptions()
    priority: PriorityClass = PriorityClass.NORMAL
    tenant: str = ""
    deadline_ns: int | None = None
    received_ns: int = 0
    tokenized_ns: int = 0
    trace_parent: str = ""  # W3C traceparent of the span above; "": none


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What an engine needs to run one sequence. `seq_id` is unique for the life of the scheduler."""

    seq_id: int
    prompt_ids: Int32Array  # [n], n >= 1
    sampling: SamplingParams
    stop_ids: tuple[int, ...] = ()  # end tokens included; at most MAX_STOP_TOKEN_IDS
    bad_words: tuple[tuple[int, ...], ...] = ()
    prefix_salt: int = 0  # int64; sequences share cached prefixes only where these are equal


# --------------------------------------------------------------------------------------------------
# What engines say
# --------------------------------------------------------------------------------------------------


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


# --------------------------------------------------------------------------------------------------
# What clients get
# --------------------------------------------------------------------------------------------------


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
    """One generated token's log-probability and the asked-for alternatives, most likely first."""

    token_id: int
    logprob: float
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
