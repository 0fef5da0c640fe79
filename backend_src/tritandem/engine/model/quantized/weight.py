"""A quantized weight in one form, whatever file it came from: values, scales and zero points as tensors.

Owns the arithmetic between that form and a dense weight, both ways. Knows nothing about files, modules or kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
MIDDLE = 8  # the zero point of symmetric four-bit codes


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """weight[n, k] = (values[n, k] - zero) * scale, both those of row n and of the group that k is in.

    `values` [N, K]: FP8, or uint8 codes 0 to 15. `scales` float32 [N, G] and `zeros` uint8 [N, G] (None: `MIDDLE` for
    codes, 0 for FP8). Groups are `group` neighbours along K, the last perhaps fewer; with `order` int64 [K] (act order)
    the group of k is order[k] instead. `input_scale`: what its inputs are to be divided by where they are rounded to
    FP8, for all tokens alike; None: each token has its own.
    """

    values: torch.Tensor
    scales: torch.Tensor
    group: int
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    input_scale: float | None = None

    @property
    def is_fp8(self) -> bool:
        return self.values.dtype == FP8

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K]; computed in float32 and rounded once."""
        wide = self.values.to(torch.float32)
        if self.zeros is not None:
            wide -= self._spread(self.zeros.to(torch.float32))
        elif not self.is_fp8:
            wide -= MIDDLE
        wide *= self._spread(self.scales)
        return wide.to(dtype)

    def to(self, device: torch.device) -> QuantizedWeight:
        moved = {
            name: tensor.to(device)
            for name in ("values", "scales", "zeros", "order")
            if (tensor := getattr(self, name)) is not None
        }
        return replace(self, **moved)

    def _spread(self, by_group: torch.Tensor) -> torch.Tensor:
        """[N, G] -> what each column of `values` has, [N, K] or [N, 1]."""
        if by_group.shape[1] == 1:
            return by_group
        if self.order is not None:
            return by_group[:, self.order]
        return by_group.repeat_interleave(self.group, dim=1)[:, : self.values.shape[1]]


def quantize_fp8(weight: torch.Tensor, block: tuple[int, int] | None = None) -> QuantizedWeight:
    """Of a dense weight [N, K]: the nearest FP8 values under one scale a row, or one a `block` of rows and columns
    (as large as the weight: one scale for all). A row or block of zeros gets the scale 1."""
    rows, inner = weight.shape
    down, across = block or (1, inner)
    wide = weight.to(torch.float32)
    padded = torch.nn.functional.pad(wide, (0, -inner % across, 0, -rows % down))
    largest = padded.view(padded.shape[0] // down, down, -1, across).abs().amax(dim=(1, 3))
    scales = torch.where(largest > 0, largest / FP8_MAX, 1.0).repeat_interleave(down, dim=0)[:rows]
    divisor = scales if scales.shape[1] == 1 else scales.repeat_interleave(across, dim=1)[:, :inner]
    values = (wide / divisor).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return QuantizedWeight(values, scales.contiguous(), across)


def quantize_int4(weight: torch.Tensor, group: int, symmetric: bool = True) -> QuantizedWeight:
    """Of a dense weight [N, K], K a multiple of `group`: the nearest of sixteen steps in each group, uncalibrated."""
    rows, inner = weight.shape
    wide = weight.to(torch.float32).view(rows, inner // group, group)
    if symmetric:
        largest = wide.abs().amax(dim=2)
        scales, zeros = torch.where(largest > 0, largest / 7.5, 1.0), None
        codes = (wide / scales[..., None]).round_() + MIDDLE
    else:
        low, high = wide.amin(dim=2).clamp_(max=0.0), wide.amax(dim=2).clamp_(min=0.0)
        scales = torch.where(high > low, (high - low) / 15, 1.0)
        zeros = (-low / scales).round_().clamp_(0, 15)
        codes = (wide / scales[..., None]).round_() + zeros[..., None]
        zeros = zeros.to(torch.uint8)
    values = codes.clamp_(0, 15).to(torch.uint8).view(rows, inner)
    return QuantizedWeight(values, scales, group, zeros)
