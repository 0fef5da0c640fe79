"""Which attention backends there are, by device and by the setting `attention`, and which one a model gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch

from .block_runs import BlockRunAttention
from .dense import DenseAttention
from .interface import AttentionBackend, Heads

log = logging.getLogger(__name__)

# (shapes of the layers, most rows of a decode step, device) -> backend. Raises ValueError for a shape it cannot take.
Build = Callable[[Sequence[Heads], int, torch.device], AttentionBackend]


def _paged(shapes: Sequence[Heads], max_rows: int, device: torch.device) -> AttentionBackend:
    from .paged import PagedAttention  # needs the Triton language, which a CPU's torch comes without

    return PagedAttention(shapes, max_rows, device)


def _block_runs(shapes: Sequence[Heads], max_rows: int, device: torch.device) -> AttentionBackend:
    return BlockRunAttention()


def _dense(shapes: Sequence[Heads], max_rows: int, device: torch.device) -> AttentionBackend:
    return DenseAttention()


# By the runner that asks; `auto` takes the first that takes the model's shapes. The dense reference is slow and in no
# graph, but it takes every head size.
BACKENDS: Mapping[str, Mapping[str, Build]] = {
    "cuda": {"paged": _paged, "dense": _dense},
    "cpu": {"paged": _block_runs, "dense": _dense},
}


def choose_attention(
    runner: str, setting: str, shapes: Sequence[Heads], max_rows: int, device: torch.device
) -> AttentionBackend:
    """`runner`: cuda (also where an interpreter runs its kernels on the CPU) or cpu; `setting`: auto, or a name in
    BACKENDS. What cannot take the shapes gives way to the next, with a warning."""
    backends = BACKENDS[runner]
    names = list(backends)
    for name in names[0 if setting == "auto" else names.index(setting) :]:
        try:
            return backends[name](shapes, max_rows, device)
        except ValueError as reason:
            log.warning("attention is not %s: %s", name, reason)
    raise AssertionError("the last one takes every shape")
