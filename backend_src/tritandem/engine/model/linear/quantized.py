"""Products with packed weights: few rows by our kernels, many by the vendor's library.

Few rows are multiplied as two FP8 parts (`parts.py`). Many rows of FP8 with a scale a row are rounded to FP8 where they
are made: behind the norm and behind the gate. For groups, codes and float32 the weight is unpacked into memory. Norms
keep their weights: no packed weight can take them in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

_PROBE_ROWS = (1, 24, 64)
# Relative. Two parts and the matrix unit's sums leave half a percent; FP8 leaves 2.6 % of random values, 5 of a gate.
_PARTS_ERROR, _ROUNDING_ERROR = 0.02, 0.1


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
        if how.rounds and uses_parts(weight, rows, dtype):
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

    def misses(self) -> str | None:
        dtype = self._norm.weight.dtype

        def run(x: torch.Tensor, how: How) -> torch.Tensor | Fp8Rows:
            if how.rounds and not uses_parts(self._weight, len(x), dtype) and _multiplies_fp8(self._weight, dtype):
                return self._rounded(x, None, None, None)
            return self(x, None, how)

        return _misses(self._weight, dtype, run)


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
            if how.rounds and uses_parts(weight, x.shape[0], x.dtype):
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

    def misses(self) -> str | None:
        def run(x: torch.Tensor, how: How) -> torch.Tensor:
            residual = x.new_zeros((len(x), self._weight.rows))
            rounds = how.rounds and self.takes_fp8 and not uses_parts(self._weight, len(x), x.dtype)
            left = self(fp8_rows.rows_fp8(x) if rounds else x, residual, how)
            return residual if left is None else left

        return _misses(self._weight, torch.bfloat16, run)


def _misses(
    weight: PackedWeight, dtype: torch.dtype, run: Callable[[torch.Tensor, How], torch.Tensor | Fp8Rows]
) -> str | None:
    """`Rounding.misses` of a product; calibrated scales, which random inputs need not fit, have no part in it."""
    for rows in _PROBE_ROWS:
        x = torch.randn(rows, weight.inner, generator=torch.Generator().manual_seed(4)).to(weight.values.device, dtype)
        made, whole = run(x.clone(), How()), run(x.clone(), How(rounds=False))
        if isinstance(made, Fp8Rows):
            made = made.values.float() * made.scales[:, None]
        assert isinstance(whole, torch.Tensor)
        error = float((made.float() - whole.float()).norm() / whole.float().norm().clamp(min=1e-6))
        rounded = _multiplies_fp8(weight, dtype) and not uses_parts(weight, rows, dtype)
        if not error <= (limit := _ROUNDING_ERROR if rounded else _PARTS_ERROR):
            kind = "rounded to FP8" if rounded else "in parts of FP8"
            size = f"{weight.rows} x {weight.inner}"
            return f"a product of {rows} rows {kind} by {size} differs by {error:.1e} (relative), allowed: {limit:.0e}"
    return None


def _multiplies_fp8(weight: PackedWeight, dtype: torch.dtype) -> bool:
    """Not a model in float32, whose digits would be lost; the vendor's library wants both sides in multiples of 16."""
    return weight.by_row and dtype != torch.float32 and weight.rows % 16 == 0 and weight.inner % 16 == 0


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
