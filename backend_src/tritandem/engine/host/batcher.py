"""What the next step does: who decodes, who prefills how much, who joins, who must give way.

One pure function over the host's view; it changes nothing and knows no torch, clock or device. The core
carries the decision out. Continuous batching after Orca (Yu et al. 2022), chunked prefill after
Sarathi-Serve (Agrawal et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..step import RunnerSpec
from .sequence import SequenceState

FEW_DECODING = 8
RESERVE_BLOCKS = 8
TURNOVER_MARGIN = 1.2  # prompts may come in at so many times the pace at which sequences end
GROWTH_S = 0.5  # and faster by as much again for each so long that they have waited for it
SCORED_TOKENS = 256  # of prompts whose own tokens are scored, in a step: each takes a row of logits


@dataclass(frozen=True, slots=True)
class Candidate:
    """The head of the waiting line, with what the prefix cache has of it."""

    sequence: SequenceState
    tokens: int  # prompt and, if it was preempted, output
    cached_blocks: Sequence[int]  # hold its first tokens already
    free_blocks_needed: int  # blocks that stop being free when it is admitted
    copied_block: int = 0  # whose first `copied_tokens` are also its own, behind those of `cached_blocks`
    copied_tokens: int = 0

    def cached_tokens(self, block_tokens: int) -> int:
        return len(self.cached_blocks) * block_tokens + self.copied_tokens


@dataclass(frozen=True, slots=True)
class BatchState:
    running: Sequence[SequenceState]  # in order of admission
    waiting: Iterable[Candidate]  # in order; a preempted sequence comes first
    free_blocks: int
    free_slots: int
    in_flight: bool  # steps are launched whose results were not read
    waiting_tokens: int = 0  # of all waiting sequences
    prompt_share: float = 0.0  # prompt tokens to prefill for each token that sequences give
    behind_s: float = 0.0  # for so long prompts have waited for chunks
    pause_tokens: int = 0  # prompt tokens of a step for which streams may pause; 0: not measured


@dataclass(frozen=True, slots=True)
class Budget:
    prefill_tokens: int
    interleaved_tokens: int  # prefill beside sequences that decode: it stretches the gap between their tokens
    stretched_tokens: int  # the same where few decode and a prompt ends by it
    efficient_tokens: Sequence[tuple[int, int]]  # (rows, tokens): the cheapest chunk beside up to so many of them
    block_tokens: int
    reserve_blocks: int  # taken at once where there is room, so that later steps need none
    pass_tokens: Sequence[int] = ()  # what a step's prompt tokens are padded to, ascending

    @classmethod
    def of(cls, spec: RunnerSpec) -> Budget:
        return cls(
            spec.prefill_tokens_per_step,
            spec.interleaved_prefill_tokens,
            spec.stretched_prefill_tokens,
            spec.efficient_prefill_tokens,
            spec.block_tokens,
            RESERVE_BLOCKS,
            spec.pass_tokens,
        )


@dataclass(frozen=True, slots=True)
class Admission:
    candidate: Candidate
    chunk_tokens: int  # of its first prefill chunk
    reserve_blocks: int  # beyond those of its known tokens


@dataclass(frozen=True, slots=True)
class Decision:
    """`preempt` and `drain` come alone: the core does it and plans again."""

    decode: Sequence[SequenceState] = ()
    grow: Sequence[tuple[SequenceState, int]] = ()  # blocks to add
    prefill: Sequence[tuple[SequenceState, int]] = ()  # tokens of this chunk; running sequences
    admit: Sequence[Admission] = ()
    behind: bool = False  # prompt tokens wait that there was no room for in the chunk
    preempt: SequenceState | None = None
    drain: bool = False  # read the results in flight first: a sequence may have finished


def plan(state: BatchState, budget: Budget) -> Decision:
    """Decode everything that can, then fill the token budget with prefill: the oldest first."""
    # Hundreds of sequences pass here in every step: plain attribute tests, no calls.
    decode = [s for s in state.running if s.stored >= s.prefill_tokens and s.promised < s.output_budget]
    short = [s for s in decode if s.stored >= len(s.blocks) * budget.block_tokens]
    if len(short) > state.free_blocks:
        if state.in_flight:
            return Decision(drain=True)
        return Decision(preempt=max(state.running, key=lambda sequence: sequence.arrival))
    free_blocks = state.free_blocks - len(short)
    grow = []
    for sequence in short:
        extra = reserve(sequence, len(sequence.blocks) + 1, free_blocks, len(state.running), budget)
        free_blocks -= extra
        grow.append((sequence, 1 + extra))

    unfinished = [s for s in state.running if s.stored < s.prefill_tokens]
    backlog = state.waiting_tokens + sum(s.prefill_tokens - s.stored for s in unfinished)
    tokens_left = prefill_budget(budget, len(decode), state)
    stretch = budget.stretched_tokens - budget.interleaved_tokens if 0 < len(decode) <= FEW_DECODING else 0
    prefill, scored_left = [], SCORED_TOKENS
    for sequence in unfinished:
        if not tokens_left:
            break
        chunk = chunk_tokens(sequence.prefill_left, tokens_left, stretch)
        if sequence.scoring:
            chunk = min(chunk, scored_left)
            scored_left -= chunk
        if chunk:
            prefill.append((sequence, chunk))
            backlog -= chunk
            tokens_left = max(0, tokens_left - chunk)

    admit: list[Admission] = []
    free_slots = state.free_slots
    waiting = iter(state.waiting)
    while tokens_left and free_slots and (candidate := next(waiting, None)) is not None:
        # Without spare blocks for those that run, a newcomer would only be preempted again.
        spare = len(state.running) + len(admit)
        if candidate.free_blocks_needed + spare > free_blocks:
            break
        if candidate.sequence.scoring and not scored_left:
            break
        free_blocks -= candidate.free_blocks_needed
        chunk = chunk_tokens(candidate.tokens - candidate.cached_tokens(budget.block_tokens), tokens_left, stretch)
        if candidate.sequence.scoring:
            chunk = min(chunk, scored_left)
            scored_left -= chunk
        needed = -(-candidate.tokens // budget.block_tokens)
        extra = reserve(candidate.sequence, needed, free_blocks, spare + 1, budget)
        admit.append(Admission(candidate, chunk, extra))
        backlog -= candidate.cached_tokens(budget.block_tokens) + chunk
        tokens_left = max(0, tokens_left - chunk)
        free_slots -= 1
        free_blocks -= extra
    return Decision(decode, grow, prefill, admit, behind=backlog > 0 and not tokens_left)


def prefill_budget(budget: Budget, decoding: int, state: BatchState) -> int:
    """Prompt tokens of the next step.

    Nobody decodes: as much as a step can take. Few do: large chunks, because a first token is worth more than
    a short pause of a few streams. Many do: the chunk that costs least beside so many, or what their successors will
    bring; slowly more while prompts wait. How many wait at one moment does not count, so that prompts which arrive
    together start one after the other, and do not end together to arrive together again. What the step is padded to
    is used, and no stream shall pause for more than `pause_tokens`.
    """
    if not decoding:
        return budget.prefill_tokens
    efficient = next((tokens for rows, tokens in budget.efficient_tokens if rows >= decoding), None)
    efficient = budget.efficient_tokens[-1][1] if efficient is None else efficient
    most = budget.interleaved_tokens
    if state.pause_tokens:
        most = min(most, max(efficient, state.pause_tokens))
    if decoding <= FEW_DECODING:
        return most
    steady = max(efficient, int(TURNOVER_MARGIN * state.prompt_share * decoding))
    wanted = int(steady * (1 + state.behind_s / GROWTH_S))
    return min(most, next((tokens for tokens in budget.pass_tokens if tokens >= wanted), wanted))


def chunk_tokens(prompt_left: int, tokens_left: int, stretch: int) -> int:
    """What a step takes of a prompt: all that is left of it if up to `stretch` tokens more than `tokens_left` make it
    so. A short tail in a step of its own would read all weights once more and let its first token wait for them."""
    return prompt_left if prompt_left <= tokens_left + stretch else tokens_left


def reserve(sequence: SequenceState, blocks: int, free_blocks: int, sharers: int, budget: Budget) -> int:
    """Blocks to take beyond `blocks`: a quarter of a fair share, but none past the sequence's last token."""
    last_block = -(-(sequence.prompt_tokens + sequence.output_budget) // budget.block_tokens)
    return max(0, min(budget.reserve_blocks, free_blocks // (4 * sharers), last_block - blocks))
