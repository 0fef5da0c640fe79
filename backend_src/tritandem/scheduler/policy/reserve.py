"""Places that a class leaves free for the classes above it, so that those need not wait for a running answer to end.

Order alone cannot do that: what runs is not taken back, and a backlog that has aged goes first. Only as many
places are held back as the classes above have lately used, and none when nobody uses them.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_SHARE = 1 / 4  # of an engine


@dataclass(frozen=True, slots=True)
class Share:
    """What requests of one class and those below it hold of an engine, with the engine's size."""

    sequences: int
    tokens: int  # expected
    max_sequences: int
    max_tokens: int  # 0: not known


def held_back(max_sequences: int, lately_above: int) -> int:
    """Places that a class must leave; `lately_above`: the most requests of the classes above at one time."""
    return min(lately_above, int(max_sequences * MAX_SHARE))


def may_start(share: Share, tokens: int, lately_above: int) -> bool:
    """Whether one more request, of so many expected tokens, leaves what is held back. Always, where nothing is."""
    places = held_back(share.max_sequences, lately_above)
    if places == 0:
        return True
    if share.sequences + 1 > share.max_sequences - places:
        return False
    kept_tokens = share.max_tokens * places // share.max_sequences
    return share.max_tokens == 0 or share.sequences == 0 or share.tokens + tokens <= share.max_tokens - kept_tokens
