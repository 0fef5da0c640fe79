"""Which engine gets a request, and whether it should get one now. Pure decisions over numbers.

An engine gets just enough to keep its batch full: what waits here can still be reordered, what waits there
cannot. Knows nothing about threads, ports or order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..contracts.stream import LoadSnapshot
from .batch_limits import BatchLimits

LOOKAHEAD_SHARE = 1 / 16  # handed over beyond the batch, so that a place that falls free is filled by the next step
DEFAULT_PREFILL_TOKEN_NS = 20_000
DEFAULT_STEP_NS = 10_000_000


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request needs. `expected_tokens`: prompt + the part of its budget it will likely use."""

    prompt_tokens: int
    expected_tokens: int

    def prefill_tokens(self, cached_tokens: int) -> int:
        """Prompt tokens that an engine which holds so many of them in its prefix cache must compute."""
        return max(1, self.prompt_tokens - cached_tokens)


@dataclass(frozen=True, slots=True)
class EngineView:
    """One engine that answers: its last report, and this side's book of what was handed over and has not ended."""

    load: LoadSnapshot
    limits: BatchLimits
    sequences: int = 0
    committed_tokens: int = 0  # expected tokens of those
    prefilling_tokens: int = 0  # prompt tokens to be computed, of those without a first token


def has_room(view: EngineView, demand: Demand, cached_tokens: int = 0) -> bool:
    """Whether the engine should get this request now. An engine without sequences takes anything."""
    if view.sequences == 0:
        return True
    most = view.limits.sequences + max(1, int(view.limits.sequences * LOOKAHEAD_SHARE))
    if view.sequences + 1 > most:
        return False
    soon_taken = view.prefilling_tokens + demand.prefill_tokens(cached_tokens)
    if view.prefilling_tokens and soon_taken > view.limits.prefill_tokens:
        return False
    load = view.load
    if load.total_blocks == 0:
        return True
    if view.committed_tokens + demand.expected_tokens > load.total_blocks * load.block_tokens:
        return False
    return load.free_blocks * load.block_tokens >= soon_taken  # free blocks do not show prompts on their way


def first_token_ns(view: EngineView, demand: Demand, cached_tokens: int) -> float:
    """Estimated time to this request's first token on that engine."""
    token_ns = view.load.prefill_token_ns or DEFAULT_PREFILL_TOKEN_NS
    step_ns = view.load.decode_step_ns or DEFAULT_STEP_NS
    prefill_tokens = view.prefilling_tokens + demand.prefill_tokens(cached_tokens)
    fullness = view.sequences / max(1, view.limits.sequences)
    return prefill_tokens * token_ns + fullness * step_ns


def choose(views: Sequence[EngineView], demand: Demand, cached_tokens: Sequence[int]) -> int | None:
    """Index of the engine with room where the first token comes soonest; None: nobody has room."""
    best: tuple[float, int, int] | None = None
    for index, (view, cached) in enumerate(zip(views, cached_tokens, strict=True)):
        if has_room(view, demand, cached):
            cost = (first_token_ns(view, demand, cached), view.sequences, index)
            best = cost if best is None else min(best, cost)
    return None if best is None else best[2]
