"""Tenants share by served tokens, not by how many requests they send.

Each tenant has an account of tokens charged. Within a rank the tenants in the lowest band of accounts go first, a
band being one quantum wide. The idea is start-time fair queueing (Goyal, Vin, Cheng 1996), with bands so that one
tenant alone, or tenants in balance, are ordered by deadline and arrival.
"""

from __future__ import annotations


def band(served_tokens: int, quantum_tokens: int) -> int:
    """Lower goes first."""
    return served_tokens // quantum_tokens


def opening_balance(served_tokens: int, lowest_band: int, quantum_tokens: int) -> int:
    """The account of a tenant that (re)appears: idle time earns no credit, old debts stay.

    `lowest_band` is the band of whoever went last.
    """
    return max(served_tokens, lowest_band * quantum_tokens)
