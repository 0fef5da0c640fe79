"""A request: of a client, after decoding and validation; and what an engine needs of it.

Tier 0. Times are `time.monotonic_ns()` of this host (CLOCK_MONOTONIC, comparable between its processes).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from .arrays import Int32Array
from .fields import SamplingParams
from .grammars import Grammar


class PriorityClass(IntEnum):
    """Lower runs first."""

    INTERACTIVE = 0
    NORMAL = 1
    BATCH = 2


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
    prompt_logprobs: bool = False
    control_tokens: bool = False  # shown in the text


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One client request after decoding and validation, before admission. `input_ids`: int32 [n], n >= 1."""

    request_id: str
    input_ids: Int32Array
    sampling: SamplingParams
    prompt_text: str | None = None  # only where the output must repeat it
    stop_words: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    named_stops: tuple[tuple[int, str | int], ...] = ()  # stop_ids that the client asked for, as it did
    bad_words: tuple[tuple[int, ...], ...] = ()  # token id sequences that must not appear
    logit_bias: tuple[tuple[int, float], ...] = ()  # each id once
    allowed_token_ids: tuple[int, ...] = ()  # (): all
    grammar: Grammar | None = None  # None: any answer
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
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    prefix_salt: int = 0  # int64; sequences share cached prefixes only where these are equal
    family: int = 0  # not 0: those of one number have one prompt, of which the engine computes the blocks once
