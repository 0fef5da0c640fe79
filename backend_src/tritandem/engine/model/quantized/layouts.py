"""From the tensors of a file to `QuantizedWeight`: how each checkpoint format lays its values, scales and zero points.

One function a layout; `LAYOUTS` is keyed by `StoredLayer.layout`. Shapes were checked by `model_facts/quantization.py`;
what only values show is checked here, and raises ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from ....model_facts.quantization import CODES_A_WORD, Quantization, StoredLayer
from .weight import QuantizedWeight

Parts = Mapping[str, torch.Tensor]
# AWQ: the code in bits 4i to 4i + 3 of a word belongs to this one of the word's eight columns.
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)


def unpack_layer(layer: StoredLayer, parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """`parts`: the tensors of `layer.parts`, by the same keys. Raises ValueError."""
    return LAYOUTS[layer.layout](layer, parts, quantization)


def _fp8(layer: StoredLayer, parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """Values as they are. `weight_scale` and, for all its name, `weight_scale_inv` are multiplied: one for the tensor,
    one a row, or one a block of rows and columns."""
    rows = layer.shape[0]
    scale = parts["weight_scale_inv"] if "weight_scale_inv" in parts else parts["weight_scale"]
    scale = scale.to(torch.float32)
    if scale.numel() in (1, rows) and layer.groups == 1:
        scale = scale.reshape(-1, 1).expand(rows, 1)
    else:
        scale = scale.repeat_interleave(quantization.block[0], dim=0)[:rows]
    given = [float(parts[part]) for part in ("input_scale", "activation_scale") if part in parts]
    if given and not 0.0 < given[0] < float("inf"):
        raise ValueError(f"its input_scale is {given[0]}")
    return QuantizedWeight(parts["weight"], scale.contiguous(), layer.group, input_scale=given[0] if given else None)


def _compressed(layer: StoredLayer, parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """compressed-tensors, pack-quantized: eight codes a word along K, the first in the lowest bits; zero points
    likewise along N. Both are stored plus 8, so that their difference is what was meant."""
    rows = layer.shape[0]
    if (stated := tuple(parts["weight_shape"].tolist())) != layer.shape:
        raise ValueError(f"its weight_shape is {stated}, {layer.shape} are packed")
    zeros = None
    if "weight_zero_point" in parts:
        zeros = _codes(parts["weight_zero_point"].t()).t()[:rows].contiguous()
    order = _order(parts.get("weight_g_idx"), layer)
    scales = parts["weight_scale"].to(torch.float32).contiguous()
    return QuantizedWeight(_codes(parts["weight_packed"]), scales, layer.group, zeros, order)


def _gptq(layer: StoredLayer, parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """Everything transposed: codes [K, N] packed along K, scales and zero points [G, N], those packed along N."""
    zeros = (_codes(parts["qzeros"]) + quantization.zero_shift) & 15
    return QuantizedWeight(
        _codes(parts["qweight"].t()),
        parts["scales"].t().to(torch.float32).contiguous(),
        layer.group,
        zeros[:, : layer.shape[0]].t().contiguous(),
        _order(parts.get("g_idx"), layer),
    )


def _awq(layer: StoredLayer, parts: Parts, quantization: Quantization) -> QuantizedWeight:
    """Codes [K, N] and zero points [G, N], both packed along N, even columns before odd ones."""
    places = torch.tensor(_AWQ_COLUMNS).argsort()

    def codes(packed: torch.Tensor) -> torch.Tensor:
        return _codes(packed).view(packed.shape[0], -1, CODES_A_WORD)[:, :, places].flatten(1).t().contiguous()

    scales = parts["scales"].t().to(torch.float32).contiguous()
    return QuantizedWeight(codes(parts["qweight"]), scales, layer.group, codes(parts["qzeros"]))


LAYOUTS: Mapping[str, Callable[[StoredLayer, Parts, Quantization], QuantizedWeight]] = MappingProxyType(
    {"fp8": _fp8, "compressed": _compressed, "gptq": _gptq, "awq": _awq}
)


def _codes(words: torch.Tensor) -> torch.Tensor:
    """int32 [A, B] -> uint8 [A, 8 * B]: four bits each, the lowest first."""
    lanes = torch.empty((*words.shape, CODES_A_WORD), dtype=torch.uint8)
    for index in range(CODES_A_WORD):
        lanes[..., index] = (words >> (4 * index)) & 15
    return lanes.flatten(1)


def _order(given: torch.Tensor | None, layer: StoredLayer) -> torch.Tensor | None:
    """The group of each input, unless it is what its place says already; -1 everywhere: never set."""
    if given is None or bool((given == -1).all()) or torch.equal(given.long(), torch.arange(len(given)) // layer.group):
        return None
    order = given.long()
    if int(order.min()) < 0 or int(order.max()) >= layer.groups:
        raise ValueError(f"its g_idx names group {int(order.max())} of {layer.groups}")
    return order
