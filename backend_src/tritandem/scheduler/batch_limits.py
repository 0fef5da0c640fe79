"""How much an engine may hold at once, following its measured step time.

A pure function from the last limits and the last measurement to the next limits; knows nothing about
requests, order or time. Additive increase, multiplicative decrease, with a dead band between the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..contracts.stream import LoadSnapshot

SLOW = 1.10  # a step this much over the target shrinks the limits
FAST = 0.85  # only a step this far under the target grows them: the band between is the hysteresis
SHRINK = 0.85
GROW_SHARE = 1 / 16
PIN_STEPS = 2000  # an engine too slow even at the floor keeps its whole batch for so long: shrinking it buys nothing
SETTLE_STEPS = 16  # steps between two changes, so that the moving average shows the last one
MIN_SEQUENCES = 8  # fewer cost about the same step: reading the weights dominates it
MIN_PREFILL_TOKENS = 256
UNMEASURED_PREFILL_TOKENS = 8192
PREFILL_AHEAD_NS = 100_000_000  # an engine gets prompts for so long at most: what it holds cannot be overtaken


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds on what is handed to one engine. 0 sequences: the engine has not answered yet.

    `prefill_tokens` bounds prompt tokens that are handed over and not prefilled; one prompt of any length
    always fits an engine without others.
    """

    sequences: int = 0
    prefill_tokens: int = 0
    decided_at_step: int = 0
    pinned_until_step: int = 0  # sequences are not reduced before


def max_prefill_tokens(load: LoadSnapshot) -> int:
    """Prompt tokens worth PREFILL_AHEAD_NS at the measured pace."""
    if load.prefill_token_ns == 0:
        return UNMEASURED_PREFILL_TOKENS
    return max(MIN_PREFILL_TOKENS, PREFILL_AHEAD_NS // load.prefill_token_ns)


def initial(load: LoadSnapshot) -> BatchLimits:
    """Everything the engine offers."""
    return BatchLimits(load.max_sequences, max_prefill_tokens(load), load.steps)


def adjust(limits: BatchLimits, load: LoadSnapshot, sequences: int, target_step_ns: int) -> BatchLimits:
    """The limits after looking at `load`, with `sequences` handed over now.

    Too slow: prefill shrinks first while prompts are waiting (it shares the steps with decode), then the number
    of sequences, down to a floor; a target that even the floor misses is given up for a while. Fast: both grow
    back, but the number of sequences only where it is what binds.
    """
    if limits.sequences == 0 or load.steps < limits.decided_at_step:  # first answer, or the engine restarted
        return initial(load)
    if load.steps - limits.decided_at_step < SETTLE_STEPS or load.decode_step_ns == 0:
        return limits
    ceiling = max_prefill_tokens(load)
    most, prefill, pinned = limits.sequences, min(limits.prefill_tokens, ceiling), limits.pinned_until_step
    if load.decode_step_ns > SLOW * target_step_ns:
        if load.waiting_tokens > 0 and prefill > MIN_PREFILL_TOKENS:
            prefill = max(MIN_PREFILL_TOKENS, int(prefill * SHRINK))
        else:
            most, pinned = _shrink(most, pinned, load)
    elif load.decode_step_ns < FAST * target_step_ns:
        if sequences >= most:
            most = min(load.max_sequences, most + max(1, int(load.max_sequences * GROW_SHARE)))
        prefill = min(ceiling, prefill + max(1, int(ceiling * GROW_SHARE)))
    if (most, prefill) == (limits.sequences, limits.prefill_tokens):
        return limits
    return BatchLimits(most, prefill, load.steps, pinned)


def _shrink(sequences: int, pinned_until_step: int, load: LoadSnapshot) -> tuple[int, int]:
    """Fewer sequences, or all of them again where even the fewest useful ones are too slow; and until when."""
    floor = min(MIN_SEQUENCES, load.max_sequences)
    if load.steps < pinned_until_step:
        return sequences, pinned_until_step
    if sequences > floor:
        return max(floor, int(min(sequences, load.running) * SHRINK)), pinned_until_step
    return load.max_sequences, load.steps + PIN_STEPS
