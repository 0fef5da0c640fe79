"""The form that our kernels read: FP8 as it is, four-bit codes two a byte; and the module that holds it in a model.

Bytes of a row hold codes in spans: `span` codes in their low halves, the `span` that follow in the high ones, so that
either half of a tile of bytes is a tile of neighbours. Knows nothing about kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from .weight import FP8, QuantizedWeight

SPANS = (128, 64, 32)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """weight[n, order[k]] = (values[n, k] - zero) * scale, groups of neighbours along k.

    `values`: FP8 [N, K], or uint8 [N, K / 2] of codes. `scales` [N, G], float32, for codes any float type that holds
    them exactly; `zeros` uint8 [N, G], None: 8 for codes, 0 for FP8. `order` int32 [K], None: as they stand.
    `input_scale` as in `QuantizedWeight`.
    """

    values: torch.Tensor
    scales: torch.Tensor
    inner: int
    group: int
    span: int
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    input_scale: float | None = None

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def is_fp8(self) -> bool:
        return self.values.dtype == FP8

    @property
    def by_row(self) -> bool:
        """FP8 with one scale a row: those scales can be applied to a product."""
        return self.is_fp8 and self.scales.shape[1] == 1 and self.order is None

    @property
    def stored_bytes(self) -> int:
        held = (self.values, self.scales, self.zeros, self.order)
        return sum(tensor.numel() * tensor.element_size() for tensor in held if tensor is not None)

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """[N, K], by torch alone: the slow twin of the kernels."""
        values = self.values if self.is_fp8 else _unpack_codes(self.values, self.span)
        weight = QuantizedWeight(values, self.scales.float(), self.group, self.zeros).dense(dtype)
        if self.order is None:
            return weight
        there = torch.empty_like(weight)
        there[:, self.order.long()] = weight
        return there

    def part(self, first: int, last: int) -> PackedWeight:
        """Rows [first, last), as views."""
        zeros = self.zeros[first:last] if self.zeros is not None else None
        return replace(self, values=self.values[first:last], scales=self.scales[first:last], zeros=zeros)


def pack(weight: QuantizedWeight) -> PackedWeight:
    """On the device of `weight`. Raises ValueError with the reason for shapes that the kernels have no tiles for."""
    inner, group, values, order = weight.values.shape[1], weight.group, weight.values, None
    if weight.scales.shape[1] == 1:
        group = inner
    if weight.order is not None:
        order = weight.order.argsort(stable=True)
        sizes = weight.order.bincount(minlength=weight.scales.shape[1])
        if not bool((sizes == group).all()):
            raise ValueError("groups of different sizes")
        values, order = values[:, order].contiguous(), order.to(torch.int32)
    if weight.is_fp8:
        if inner % 16 or (group < inner and group not in SPANS):
            raise ValueError(f"{inner} inputs in groups of {group}")
        wide = group if group < inner else SPANS[0]
        return PackedWeight(values, weight.scales, inner, group, wide, None, order, weight.input_scale)
    span = next((s for s in SPANS if inner % (2 * s) == 0 and group % s == 0), None)
    if span is None:
        raise ValueError(f"{inner} inputs in groups of {group}")
    codes, scales = _pack_codes(values, span), narrowed(weight.scales)
    return PackedWeight(codes, scales, inner, group, span, weight.zeros, order)


def merge(parts: Sequence[PackedWeight]) -> PackedWeight:
    """One under the other. Their inputs are the same: of several scales of those the largest holds all of them.

    Raises ValueError for weights of different forms."""
    first = parts[0]
    if len(parts) == 1:
        return first
    forms = {(p.values.dtype, p.inner, p.group, p.span, p.zeros is None, p.order is None) for p in parts}
    orders = [p.order for p in parts if p.order is not None]
    if len(forms) > 1 or not all(torch.equal(order, orders[0]) for order in orders):
        raise ValueError("projections side by side are quantized in different ways")
    scales = [p.scales for p in parts]
    if len({s.dtype for s in scales}) > 1:
        scales = [s.float() for s in scales]
    zeros = torch.cat([p.zeros for p in parts if p.zeros is not None]) if first.zeros is not None else None
    static = [p.input_scale for p in parts if p.input_scale is not None]
    input_scale = max(static) if len(static) == len(parts) else None
    values = torch.cat([p.values for p in parts])
    return PackedWeight(
        values, torch.cat(scales), first.inner, first.group, first.span, zeros, first.order, input_scale
    )


class PackedLinear(nn.Module):
    """Stands where a linear layer stood. Its own product unpacks the weight each time: what runs a model fast are the
    products of `linear/`, which this one is compared with."""

    def __init__(self, packed: PackedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.packed, self.bias = packed, bias
        self.in_features, self.out_features = packed.inner, packed.rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.packed.dense(x.dtype), self.bias)


def _pack_codes(codes: torch.Tensor, span: int) -> torch.Tensor:
    pairs = codes.view(codes.shape[0], -1, 2, span)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).flatten(1).contiguous()


def _unpack_codes(packed: torch.Tensor, span: int) -> torch.Tensor:
    bytes_ = packed.view(packed.shape[0], -1, 1, span)
    return torch.cat((bytes_ & 15, bytes_ >> 4), dim=2).flatten(1)


def narrowed(scales: torch.Tensor) -> torch.Tensor:
    """In two bytes where that changes nothing, which it does not for scales that a file had in two bytes."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(scales.to(dtype).to(scales.dtype), scales):
            return scales.to(dtype)
    return scales
