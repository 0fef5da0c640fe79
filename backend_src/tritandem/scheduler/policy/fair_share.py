"""Tenants share by served tokens, not by how many requests they send.

Each tenant has an account of tokens charged. Within a rank, tenants no more than a quantum ahead of the one
that got least may go; inside that band, deadlines and arrival decide. The idea is start-time fair queueing
(Goyal, Vin, Cheng 1996) with a band, so that one tenant alone, or tenants in balance, are ordered by deadline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping


def eligible(tenants: Iterable[str], served_tokens: Mapping[str, int], quantum_tokens: int) -> list[str]:
    """Those of `tenants` whose turn it may be; at least one unless `tenants` is empty."""
    known = list(tenants)
    if len(known) < 2:
        return known
    bound = min(served_tokens[tenant] for tenant in known) + quantum_tokens
    return [tenant for tenant in known if served_tokens[tenant] <= bound]


def opening_balance(served_tokens: int, virtual_tokens: int) -> int:
    """The account of a tenant that (re)appears: idle time earns no credit, old debts stay.

    `virtual_tokens` is the account of the least served tenant when last somebody went.
    """
    return max(served_tokens, virtual_tokens)
