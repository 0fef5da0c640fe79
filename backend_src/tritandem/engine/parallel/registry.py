"""Who carries an exchange, by the kind of device."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .interface import Exchange, Rank, Sizes


def make_ranks(devices: Sequence[torch.device]) -> list[Rank]:
    """One a device, in order; a device may stand there twice."""
    return [Rank(index, len(devices), device) for index, device in enumerate(devices)]


def make_exchanges(ranks: Sequence[Rank], sizes: Sizes) -> list[Exchange]:
    """One for each rank; all devices are of one kind. Raises ValueError where they cannot be joined."""
    if all(rank.device.type == "cuda" for rank in ranks):
        from .peers import PeerExchange  # each kind is loaded where it is used

        return list(PeerExchange.together(ranks, sizes))
    from .threads import ThreadExchange

    return list(ThreadExchange.together(ranks, sizes))
