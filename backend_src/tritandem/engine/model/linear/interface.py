"""What a decoder asks of a product: three kinds, by where they stand in a layer. `registry.py` knows who multiplies.

Whoever multiplies owns the weights and decides what is done in the same launch: norm, bias, gate, residual. All
tensors are contiguous and of the model's dtype; [T] tokens are packed. No host synchronisation on CUDA.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch


class Unfusable(Exception):
    """The model is not of the shape that is fused; the message says what differs."""


@dataclass(frozen=True, slots=True)
class Norm:
    """An RMS norm: `weight` [inner]. A product may take the weight into its own and leave ones here, in place."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class How:
    """`fuse`: the products of a decode step, where launches are what costs. `overlap`: a launch may begin while the
    kernel before it ends (it waits before it reads); so may every kernel between. `rounds`: a quantized weight may be
    multiplied by what is fastest, activations rounded; else as if it were unpacked."""

    fuse: bool = False
    overlap: bool = False
    rounds: bool = True


class NormedLinear(Protocol):
    """The product behind a norm: queries, keys and values; gate and up, whose result is silu(gate) * up; the head."""

    columns: int  # of the result

    def __call__(self, residual: torch.Tensor, delta: torch.Tensor | None, how: How) -> torch.Tensor:
        """residual [T, inner] += delta, in place; returns the product of its norm, [T, columns]."""

    def overlaps(self, rows: int) -> bool:
        """Whether a decode step over so many rows runs this product in a kernel that takes part in overlapping."""


@runtime_checkable
class Feeding(Protocol):
    """A `NormedLinear` that may hand its result on in a form that the product behind it alone reads."""

    def feed(self, following: ResidualLinear) -> None:
        """Once, before the first call."""


@runtime_checkable
class Rounding(Protocol):
    """A product whose result depends on `How.rounds`."""

    def misses(self) -> str | None:
        """In words, how its ways to multiply random inputs differ more than they should; None: they do not."""


class ResidualLinear(Protocol):
    """The product whose result goes to the residual: out and down."""

    inner: int

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, how: How) -> torch.Tensor | None:
        """The product of `x` [T, inner], or None where it has been added to `residual` [T, columns] already."""


@runtime_checkable
class PartialLinear(ResidualLinear, Protocol):
    """A `ResidualLinear` whose product may be a part of a sum over ranks."""

    def product(self, x: torch.Tensor, how: How) -> torch.Tensor:
        """The product of `x` [T, inner] alone, contiguous [T, columns]."""
