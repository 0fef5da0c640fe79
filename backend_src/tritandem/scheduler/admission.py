"""May this request wait here at all? One pure decision over numbers.

Knows nothing about order, engines' identities, threads or clocks; `load` is the sum over the engines that
answer. Work is counted in tokens (prompt + output budget), because requests differ a thousandfold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..contracts.errors import DeadlineExpired, Draining, InvalidRequest, Saturated, TritandemError
from ..contracts.requests import GenerationRequest, PriorityClass
from ..contracts.stream import LoadSnapshot
from .policy.places import may_hold

MIN_RETRY_S = 0.1
MAX_RETRY_S = 600.0
UNMEASURED_RETRY_S = 1.0
BATCH_QUEUE_SHARE = 7 / 8  # of the waiting queue: a backlog of batch requests must not shut the others out


@dataclass(frozen=True, slots=True)
class QueueState:
    """What waits already."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0  # budgets

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def plus(self, prompt_tokens: int, output_tokens: int) -> QueueState:
        return QueueState(self.requests + 1, self.prompt_tokens + prompt_tokens, self.output_tokens + output_tokens)

    def with_all(self, other: QueueState) -> QueueState:
        return QueueState(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.output_tokens + other.output_tokens,
        )

    def minus(self, prompt_tokens: int, output_tokens: int) -> QueueState:
        return QueueState(self.requests - 1, self.prompt_tokens - prompt_tokens, self.output_tokens - output_tokens)


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of the waiting queue; `accepting` is false once the server drains."""

    max_requests: int
    max_tokens: int
    accepting: bool = True

    def of(self, priority: PriorityClass) -> tuple[int, int]:
        """(requests, tokens) that may wait once a request of this class has joined."""
        if priority is not PriorityClass.BATCH:
            return self.max_requests, self.max_tokens
        return max(1, int(self.max_requests * BATCH_QUEUE_SHARE)), int(self.max_tokens * BATCH_QUEUE_SHARE)


@dataclass(frozen=True, slots=True)
class Backlog:
    """All that waits; of it, what the request's tenant has in the request's class and those above; how it shrinks."""

    queue: QueueState
    own: QueueState
    load: LoadSnapshot
    use_ratio: float = 1.0  # of the budgets that finished answers used
    tokens_per_s: float = 0.0  # measured lately; 0: not known

    def retry_after_s(self) -> float:
        """How long the work ahead takes: at the measured pace of whole requests, or, before there is one, with every
        prompt prefilled once and every output step shared by a batch."""
        if self.tokens_per_s:
            ahead_s = self.queue.tokens / self.tokens_per_s
        elif self.load.decode_step_ns == 0 and self.load.prefill_token_ns == 0:
            return UNMEASURED_RETRY_S
        else:
            prefill_tokens = self.queue.prompt_tokens + self.load.waiting_tokens
            steps = self.queue.output_tokens * self.use_ratio / max(1, self.load.max_sequences)
            ahead_s = (prefill_tokens * self.load.prefill_token_ns + steps * self.load.decode_step_ns) / 1e9
        return min(MAX_RETRY_S, max(MIN_RETRY_S, ahead_s))


def decide(
    request: GenerationRequest,
    backlog: Backlog,
    limits: AdmissionLimits,
    now_ns: int,
    prompt_tokens: int | None = None,
) -> TritandemError | None:
    """None: it may wait. Otherwise the error that answers it at once; whatever runs is untouched. `prompt_tokens`: that
    it costs; None: all of them.

    Draining, DeadlineExpired, InvalidRequest (it could never run on these engines) or Saturated.
    """
    if not limits.accepting:
        return Draining()
    if request.deadline_ns is not None and now_ns >= request.deadline_ns:
        return DeadlineExpired("the deadline had passed on arrival")
    refusal = never_fits(len(request.input_ids), request.sampling.max_tokens, backlog.load)
    if refusal is not None:
        return refusal
    rows = backlog.load.max_sequences
    if 0 < rows < request.sampling.n:
        return too_many_choices(request.sampling.n, rows)
    own_tokens = len(request.input_ids) if prompt_tokens is None else prompt_tokens
    demand_tokens = own_tokens + request.sampling.max_tokens
    return no_place(request.priority, demand_tokens, backlog, limits)


def no_place(
    priority: PriorityClass, demand_tokens: int, backlog: Backlog, limits: AdmissionLimits
) -> Saturated | None:
    """Whether the queue has a place for one more of this class, for so many tokens, from the tenant of `backlog`."""
    max_requests, max_tokens = limits.of(priority)
    queue, own = backlog.queue, backlog.own
    if not may_hold(own.requests, queue.requests, max_requests):
        return Saturated(f"{_told(own.requests, queue.requests)} requests are waiting", backlog.retry_after_s())
    if queue.requests and not may_hold(own.tokens, queue.tokens, max_tokens, demand_tokens):
        reason = f"requests for {_told(own.tokens, queue.tokens)} tokens are waiting"
        return Saturated(reason, backlog.retry_after_s())
    return None


def _told(own: int, of_all: int) -> str:
    return f"{own}" if own == of_all else f"{own} of this tenant's and {of_all - own} other"


def too_many_choices(n: int, rows: int) -> InvalidRequest:
    return InvalidRequest("n", n, f"at most {rows}, the sequences that the engines take at once")


def never_fits(prompt_tokens: int, output_tokens: int, load: LoadSnapshot) -> InvalidRequest | None:
    """The field that no amount of waiting would cure. Limits of 0 are not known yet and refuse nothing."""
    most = longest_sequence(load)
    if most == 0:
        return None
    if prompt_tokens >= most:
        return InvalidRequest("text_input", f"{prompt_tokens} tokens", f"at most {most - 1} tokens on this server")
    if prompt_tokens + output_tokens > most:
        return InvalidRequest(
            "max_tokens", output_tokens, f"at most {most - prompt_tokens} after a prompt of {prompt_tokens} tokens"
        )
    return None


def longest_sequence(load: LoadSnapshot) -> int:
    """Tokens of prompt and answer that one sequence may have; 0: not known yet."""
    limits = (load.max_context_tokens, load.total_blocks * load.block_tokens)
    return min((limit for limit in limits if limit > 0), default=0)


def expected_tokens(prompt_tokens: int, output_tokens: int, use_ratio: float) -> int:
    """KV tokens a request will likely hold: clients ask for more output than models produce.

    `use_ratio` is the measured share of the budget that finished answers used. A margin keeps preemption
    rare; an engine that runs out nevertheless preempts, which costs time but no answer.
    """
    return prompt_tokens + min(output_tokens, int(output_tokens * use_ratio * 1.25) + 16)


def total_load(loads: Sequence[LoadSnapshot]) -> LoadSnapshot:
    """Engines that answer, seen as one: room adds up, paces are those of engines working side by side.

    `total_blocks` and `max_context_tokens` are those of the largest engine: a sequence lives on one.
    """
    if not loads:
        return LoadSnapshot()
    if len(loads) == 1:
        return loads[0]
    largest = max(loads, key=lambda load: load.total_blocks * load.block_tokens)
    steps = [load.decode_step_ns for load in loads if load.decode_step_ns]
    paces = [load.prefill_token_ns for load in loads if load.prefill_token_ns]
    return LoadSnapshot(
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        waiting_tokens=sum(load.waiting_tokens for load in loads),
        free_blocks=sum(load.free_blocks for load in loads),
        total_blocks=largest.total_blocks,
        block_tokens=largest.block_tokens,
        max_sequences=sum(load.max_sequences for load in loads),
        max_context_tokens=max(load.max_context_tokens for load in loads),
        decode_step_ns=sum(steps) // len(steps) if steps else 0,
        prefill_token_ns=sum(paces) // len(paces) // len(loads) if paces else 0,
    )
