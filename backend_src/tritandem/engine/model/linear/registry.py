"""Who multiplies: the product for a layer's modules, by what they are. A format of weights is one line here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from ..joined import Gathered, Summed
from .interface import Feeding, Norm, NormedLinear, PartialLinear, ResidualLinear, Unfusable
from .joined import GatheredNormed, SummedResidual


@dataclass(frozen=True, slots=True)
class Format:
    """`normed(modules, norm, gated, shared)` and `residual(module)` raise Unfusable for what they cannot take."""

    handles: Callable[[nn.Module], bool]
    normed: Callable[[Sequence[nn.Module], Norm, bool, bool], NormedLinear]
    residual: Callable[[nn.Module], ResidualLinear]


def _dense() -> Format:
    from . import dense  # needs the Triton language, which a CPU's torch comes without

    return Format(dense.handles, dense.DenseNormed, dense.DenseResidual)


def _quantized() -> Format:
    from . import quantized  # the same

    return Format(quantized.handles, quantized.QuantizedNormed, quantized.QuantizedResidual)


# The first that handles all modules of a product multiplies them; those behind it are not even loaded.
FORMATS: tuple[Callable[[], Format], ...] = (_dense, _quantized)


def normed_linear(
    modules: Sequence[nn.Module],
    norm: Norm,
    gated: bool = False,
    shared: bool = False,
    feeds: ResidualLinear | None = None,
) -> NormedLinear:
    """The product of `modules`, side by side, behind `norm`. `gated`: they are gate and up. `shared`: the weights
    serve elsewhere as well and must stay as they are. `feeds`: who alone gets the result. Raises Unfusable."""
    head = modules[0]
    if isinstance(head, Gathered):
        return GatheredNormed(normed_linear([head.part], norm, gated, shared), head.exchange)
    product = _format(modules).normed(modules, norm, gated, shared)
    if feeds is not None and isinstance(product, Feeding):
        product.feed(feeds)
    return product


def residual_linear(module: nn.Module) -> ResidualLinear:
    """Raises Unfusable."""
    if isinstance(module, Summed):
        part = residual_linear(module.part)
        if not isinstance(part, PartialLinear):
            raise Unfusable(f"{type(part).__name__} makes no part of a sum over ranks")
        return SummedResidual(part, module.exchange)
    return _format([module]).residual(module)


def _format(modules: Sequence[nn.Module]) -> Format:
    for known in (load() for load in FORMATS):
        if all(known.handles(module) for module in modules):
            return known
    names = " and ".join(sorted({type(module).__name__ for module in modules}))
    raise Unfusable(f"{names} stands where a linear layer that can be fused was expected")
