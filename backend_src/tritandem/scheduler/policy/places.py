"""Nobody holds all waiting places: what one may hold follows what is left for the others.

Dynamic thresholds (Choudhury and Hahne 1998): alone, a tenant fills seven eighths; two that ask for everything get
seven fifteenths each; whoever comes new finds a place. Places may be requests or tokens.
"""

from __future__ import annotations

TIMES_FREE = 7  # of the free places, which a newcomer will find, one may hold so many times as much


def may_hold(held: int, waiting: int, limit: int, more: int = 1) -> bool:
    """Whether one that holds `held` of the `waiting` places, of which there are `limit`, may take `more`."""
    free = limit - waiting - more
    return free >= 0 and (held == 0 or held + more <= TIMES_FREE * free)
