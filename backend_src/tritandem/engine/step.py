"""The contract between the engine's core (host: decides) and its runner (device: executes).

The core describes a step, the runner launches it; results come back in launch order, possibly several
launches later. The device owns the truth about a running row (last token, length, remaining budget,
finished flag): a step that follows needs nothing from the host. Host arrays are numpy; no torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..contracts.arrays import Float32Array, Int32Array, UInt8Array
from ..contracts.fields import SamplingParams
from ..contracts.stream import TokenScores

# Features with tables beside the rows.
PENALISED, BAD_WORDS = "penalised", "bad_words"
LOGIT_BIAS, ALLOWED_TOKENS = "logit_bias", "allowed_token_ids"
STRUCTURED = "structured"  # the host says step by step which tokens the structure of a row's answer allows
TABLED = "tabled"  # a device follows the structure of a row's answer by a table
# What a row says of its structure; TABLES + n: it is followed by table n.
FREE, MASKED, TABLES = 0, 1, 2
TABLE_STATES = TABLE_CLASSES = 256
TABLE_PLACES = 64


@dataclass(frozen=True, slots=True)
class SlotInit:
    """A sequence takes a slot (a fixed device row for its whole life). Precedes its first prefill chunk.

    `output_ids` are tokens generated before a preemption: they count against the budget, for penalties and
    for the random counter, so that the resumed sequence continues with identical output. Prefill then
    covers prompt + output.
    """

    slot: int
    prompt_ids: Int32Array  # [n]
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    output_ids: Int32Array  # [m], usually empty
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    structure: int = FREE
    structure_state: int = 0  # of its table

    @property
    def rare(self) -> bool:
        """It has what a row does not carry: lists of tokens, or what penalties look at."""
        lists = self.bad_words or self.logit_bias or self.allowed_token_ids
        return bool(lists) or PENALISED in self.sampling.features


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Positions [start, start + len(ids)) of one slot. The last chunk samples the next token.

    Its KV blocks are in the block table before this step (`block_updates` of this or an earlier step). `targets` are
    to be scored: the tokens that follow its first, second, ... position; of a prompt's last there is none.
    """

    slot: int
    start: int
    ids: Int32Array
    last: bool
    targets: Int32Array | None = None  # [n], n <= len(ids)
    alternatives: int = 0  # likeliest tokens reported beside each


@dataclass(frozen=True, slots=True)
class SamplingFeatures:
    """What the rows of a step that sample need beyond argmax; selects the graph variant."""

    asked: frozenset[str] = frozenset()  # names of features of `sampling/`, by any row
    top_logprobs: int = -1  # -1: none asked; 0: the chosen token's; n: n alternatives

    @property
    def penalised(self) -> bool:
        """The step must count its tokens in the tables of penalties."""
        return PENALISED in self.asked


GREEDY = SamplingFeatures()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Order of effects: tables, releases, inits, block updates, copies of blocks, prefill, decode.

    A slot whose last prefill chunk is in this step decodes from the next step on. `decode_slots` may hold
    rows that have finished on the device unknown to the host: they write nothing and report token -1.
    """

    step_id: int
    releases: Sequence[int] = ()
    inits: Sequence[SlotInit] = ()
    block_updates: Int32Array | None = None  # [U, 3] slot, index in its block table, block id
    copies: Sequence[tuple[int, int]] = ()  # KV blocks: what is in the first is written to the second
    prefill: Sequence[PrefillChunk] = ()
    decode_slots: Sequence[int] = ()
    features: SamplingFeatures = field(default_factory=SamplingFeatures)
    tables: Sequence[tuple[int, Int32Array]] = ()  # number, and the table_words of it

    @property
    def masked_slots(self) -> tuple[int, ...]:
        """Those whose next token may depend on a mask of the host's; () where no row of the step does."""
        if STRUCTURED not in self.features.asked:
            return ()
        return (*(chunk.slot for chunk in self.prefill if chunk.last), *self.decode_slots)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: R rows, last prefill chunks first (plan order), then the decode slots in order.

    `tokens[i]` is -1 when row i had finished in an earlier step. `finish` holds FinishCode values: STOP
    (a stop id was produced; that token is reported), LENGTH (budget or context used up) or ERROR (its logits
    were not finite; its token means nothing).
    """

    step_id: int
    slots: Int32Array  # [R]
    tokens: Int32Array  # [R]
    finish: UInt8Array  # [R]
    launched_ns: int
    finished_ns: int
    logprobs: Float32Array | None = None  # [R], NaN where not asked for
    top_ids: Int32Array | None = None  # [R, K]
    top_logprobs: Float32Array | None = None  # [R, K]
    scores: Sequence[TokenScores] = ()  # of chunks with targets, in the plan's order


@dataclass(frozen=True, slots=True)
class RunnerSpec:
    """What the core must know of a loaded runner."""

    device: str
    num_slots: int
    num_blocks: int  # block 0 is the null block: padding rows write there, it is never allocated
    block_tokens: int
    max_context_tokens: int
    prefill_tokens_per_step: int
    interleaved_prefill_tokens: int  # the same beside running sequences, whose next token waits for it
    # (rows, tokens), rows ascending: the least chunk that is about the cheapest a token beside up to so many rows
    efficient_prefill_tokens: tuple[tuple[int, int], ...]
    vocab_size: int
    launch_ahead_steps: int  # 0: launch() has finished when it returns
    window_tokens: int | None = None  # what the farthest-seeing layer sees, its own token included; None: everything
    pass_tokens: tuple[int, ...] = ()  # what prefill is padded to, ascending; (): to nothing
    table_places: int = 0  # tables of structures that the device can hold
    stateful: bool = False  # layers keep a state of all tokens so far: no prefix is reused, no step runs twice

    @property
    def stretched_prefill_tokens(self) -> int:
        return stretched_tokens(self.interleaved_prefill_tokens, self.prefill_tokens_per_step)


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask over the vocabulary, a bit a token: as many as make rows of whole 16 bytes."""
    return -(-vocab_size // 128) * 4


def table_words(vocab_size: int) -> int:
    """int32 words of a table: a byte for the class of each token, and one for each state and class: the next state."""
    return (32 * mask_words(vocab_size) + TABLE_STATES * TABLE_CLASSES) // 4


def stretched_tokens(interleaved_tokens: int, tokens_per_step: int) -> int:
    """What a step beside few running sequences may prefill when that ends a prompt: an eighth more than usual."""
    return min(tokens_per_step, interleaved_tokens * 9 // 8)


def output_budget(max_tokens: int, prompt_tokens: int, max_context_tokens: int) -> int:
    """Output tokens that a sequence may produce: its own limit or what the context has left."""
    return min(max_tokens, max_context_tokens - prompt_tokens)


class Runner(Protocol):
    """Executes steps in launch order; used by the core's thread only."""

    spec: RunnerSpec
    masks: Int32Array  # [slots, mask_words] in host memory, written by the core: bit i set: token i is allowed

    def launch(self, plan: StepPlan) -> None:
        """Enqueue a step. Raises StepFailed when this step could not run; earlier steps are unaffected, and rows that
        decode are as they were, while a prompt that ended may have had its first token chosen."""

    def masks_ready(self, step_id: int) -> None:
        """The rows in `masks` of this step's `masked_slots` hold what its tokens depend on: it may choose them. A step
        waits for this where it has such slots and was launched behind another; the others were ready before."""

    def collect(self, wait: bool) -> StepResult | None:
        """The oldest uncollected result; None if none is ready (wait=False) or none is pending."""

    def pending(self) -> int:
        """Steps launched and not collected."""

    def busy(self) -> bool:
        """Whether the device still works on what was launched."""

    def prepare(self) -> bool:
        """Nothing is pending and nobody waits: make one thing ready with which later steps run faster, in tens of
        milliseconds; `spec` may be another one then. False: there is nothing left to prepare."""

    def close(self) -> None:
        """Wait for the device and free everything."""


class StepFailed(Exception):
    """A step could not run (out of device memory, a kernel error). `slots` are the rows it concerned."""

    def __init__(self, message: str, slots: Sequence[int]) -> None:
        super().__init__(message)
        self.slots = tuple(slots)
