"""Products with packed weights: few rows by our kernels, many by the vendor's library.

Few rows are multiplied as two FP8 parts (`parts.py`). Many rows of FP8 with a scale a row are rounded to FP8 where they
are made: behind the norm and behind the gate. For groups, codes and float32 the weight is unpacked into memory. Norms
keep their weights: no packed weight can take them in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import nn

from ..quantized.packing import PackedLinear, PackedWeight, merge
from . import fp8_rows
from .fp8_rows import Fp8Rows
from .interface import How, Norm, Unfusable
from .parts import parts_linear, split, uses_parts
from .rowwise import add_norm, silu_mul
from .unpacked import unpacked_linear

_PROBE_ROWS = 64


def handles(module: nn.Module) -> bool:
    return isinstance(module, PackedLinear)


class QuantizedNormed:
    """`NormedLinear`."""

    def __init__(self, modules: Sequence[nn.Module], norm: Norm, gated: bool = False, shared: bool = False) -> None:
        """Raises Unfusable for weights that cannot be merged, and for a bias at some of them or beside a gate."""
        self._weight, self._bias = _merged([cast(PackedLinear, module) for module in modules])
        if gated and self._bias is not None:
            raise Unfusable("its MLP has a bias")
        self._norm, self._gated = norm, gated
        self._one = _one(self._weight)
        self._feeds_fp8 = False
        self._fed_scale: float | None = None
        self.columns = self._weight.rows // 2 if gated else self._weight.rows

    def feed(self, following: object) -> None:
        """The result goes to `following` alone, which may take it in FP8."""
        if self._gated and isinstance(following, QuantizedResidual) and following.takes_fp8:
            self._feeds_fp8, self._fed_scale = True, following.input_scale

    def __call__(self, residual: torch.Tensor, delta: torch.Tensor | None, how: How) -> torch.Tensor:
        rows, dtype = residual.shape[0], residual.dtype
        weight, bias, gated = self._weight, self._bias, self._gated
        if uses_parts(weight, rows, dtype):
            parts = split(delta, weight, residual, self._norm, how.overlap)
            return parts_linear(parts, weight, dtype, bias=bias, gated=gated, overlap=how.overlap)
        if how.rounds and _multiplies_fp8(
            weight, dtype
        ):  # what is no tensor goes to `feed`'s product, which expects it
            return cast(torch.Tensor, self._rounded(residual, delta, weight.input_scale, self._fed_scale))
        product = unpacked_linear(add_norm(delta, residual, self._norm, how.overlap), weight, bias)
        return silu_mul(product, how.overlap) if gated else product

    def _rounded(
        self, residual: torch.Tensor, delta: torch.Tensor | None, scale: float | None, fed_scale: float | None
    ) -> torch.Tensor | Fp8Rows:
        """FP8 by FP8; the scales are calibrated ones of its inputs and of the product's that it feeds."""
        weight, dtype = self._weight, residual.dtype
        made = fp8_rows.multiply(fp8_rows.add_norm_fp8(delta, residual, self._norm, scale), weight, self._one, dtype)
        if self._gated:
            return fp8_rows.gate(made, weight, dtype, self._feeds_fp8, fed_scale)
        return fp8_rows.finish(made, weight, dtype, self._bias)

    def overlaps(self, rows: int) -> bool:
        return uses_parts(self._weight, rows, self._norm.weight.dtype)

    def rounding_error(self) -> float:
        if not _multiplies_fp8(self._weight, self._norm.weight.dtype):
            return 0.0
        x = _probe(self._weight, self._norm.weight.dtype)
        made = self._rounded(x.clone(), None, None, None)
        if isinstance(made, Fp8Rows):
            made = made.values.float() * made.scales[:, None]
        return _distance(made, self(x, None, How(rounds=False)))


class QuantizedResidual:
    """`ResidualLinear`."""

    def __init__(self, module: nn.Module) -> None:
        """Raises Unfusable for a bias."""
        packed = cast(PackedLinear, module)
        if packed.bias is not None:
            raise Unfusable("its output projections have a bias")
        self._weight, self._one = packed.packed, _one(packed.packed)
        self.inner: int = self._weight.inner
        self.takes_fp8 = _multiplies_fp8(self._weight, torch.bfloat16)
        self.input_scale = self._weight.input_scale

    def __call__(self, x: torch.Tensor | Fp8Rows, residual: torch.Tensor, how: How) -> torch.Tensor | None:
        weight = self._weight
        if isinstance(x, torch.Tensor):
            if uses_parts(weight, x.shape[0], x.dtype):
                parts = split(x, weight, overlap=how.overlap)
                parts_linear(parts, weight, x.dtype, residual=residual, overlap=how.overlap)
                return None
            if not (how.rounds and _multiplies_fp8(weight, x.dtype)):
                return unpacked_linear(x, weight, None)
            x = fp8_rows.rows_fp8(x, self.input_scale)
        made = fp8_rows.multiply(x, weight, self._one, residual.dtype)
        if made.row_scales is None:
            return made.values
        fp8_rows.finish(made, weight, residual.dtype, residual=residual)
        return None

    def rounding_error(self) -> float:
        if not self.takes_fp8:
            return 0.0
        x = _probe(self._weight, torch.bfloat16)
        residual = x.new_zeros((_PROBE_ROWS, self._weight.rows))
        left = self(fp8_rows.rows_fp8(x), residual, How())
        return _distance(residual if left is None else left, unpacked_linear(x, self._weight, None))


def _multiplies_fp8(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Not a model in float32, whose digits would be lost; the vendor's library wants both sides in multiples of 16."""
    return weight.by_row and dtype != torch.float32 and weight.rows % 16 == 0 and weight.inner % 16 == 0


def _probe(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Random inputs [_PROBE_ROWS, K]."""
    x = torch.randn(_PROBE_ROWS, weight.inner, generator=torch.Generator().manual_seed(4))
    return x.to(weight.values.device, dtype)


def _distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-6))


def _one(weight: PackedWeight) -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device=weight.values.device)


def _merged(modules: Sequence[PackedLinear]) -> tuple[PackedWeight, torch.Tensor | None]:
    """Weights (and biases) one under the other; the modules keep views, so no memory is held twice."""
    biases = [module.bias for module in modules if module.bias is not None]
    if len(biases) not in (0, len(modules)):
        raise Unfusable("only some projections have a bias")
    try:
        whole = merge([module.packed for module in modules])
    except ValueError as error:
        raise Unfusable(str(error)) from None
    row = 0
    for module in modules:
        module.packed = whole.part(row, row + module.out_features)
        row += module.out_features
    return whole, torch.cat(biases) if len(biases) > 1 else biases[0] if biases else None
