"""A rank's model joined with the others': what is a part of a sum is added up, what is a part of the logits gathered.

The modules stand where transformers' own code looks for a linear layer; `linear/joined.py` is their fast twin.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..parallel.interface import Exchange
from .share import DOWN, HEAD, OUT, Share


class _Joined(nn.Module):
    """A linear layer of which this rank has `part`."""

    part: nn.Module
    exchange: Exchange

    def __init__(self, part: nn.Module, exchange: Exchange) -> None:
        super().__init__()
        self.part, self.exchange = part, exchange


class Summed(_Joined):
    """A linear layer over a part of its inputs, on every rank; the result is the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        partial: torch.Tensor = self.part(x)
        return self.exchange.sum(partial)


class Gathered(_Joined):
    """A linear layer of which every rank has a part of the outputs; the result is all of them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part: torch.Tensor = self.part(x)
        rows = part.reshape(-1, part.shape[-1])
        columns = rows.shape[1] * self.exchange.rank.count
        whole = self.exchange.gather_columns(rows) if len(rows) else rows.new_empty((0, columns))
        return whole.view(*part.shape[:-1], columns)


def join(model: PreTrainedModel, share: Share, exchange: Exchange) -> None:
    """In place: from now on a pass of `model` is a pass of all ranks together."""
    for name, module in list(model.named_modules()):
        if name.rpartition(".")[2] in (OUT, DOWN):
            model.set_submodule(name, Summed(module, exchange))
    if share.head is not None:
        model.set_submodule(HEAD, Gathered(_head_part(model, share), exchange))


def _head_part(model: Any, share: Share) -> nn.Linear:
    """A tied head is as large as the embedding, which every rank has: a view of it is this rank's part."""
    head: nn.Linear = model.get_submodule(HEAD)
    if share.head is None or head.out_features == share.head.end - share.head.start:
        return head
    with torch.device("meta"):
        part = nn.Linear(head.in_features, share.head.end - share.head.start, bias=False)
    part.weight = nn.Parameter(share.head.of(head.weight.data), requires_grad=False)
    return part
