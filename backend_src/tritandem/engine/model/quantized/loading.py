"""A model from quantized files, and a quantized model from whole weights (`engine.quantization`).

Owns which layers are which, what is said about it and what is refused. Where there are kernels for them (CUDA) packed
weights stand in the model as `PackedLinear`; a CPU has none, and experts that a model merges have none either: they are
unpacked at load, or quantized and unpacked again, so that answers are those of the quantized model.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ....contracts.errors import ConfigError
from ..weight_names import refuse_report
from .files import QuantizedFiles
from .packing import SPANS, PackedLinear, pack
from .weight import QuantizedWeight, quantize_fp8, quantize_int4

GB = 1e9
# What the fused decoder multiplies by our kernels; experts shared by all tokens are the module's own code.
_WITH_PRODUCTS = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj|lm_head")


def load_quantized(
    files: QuantizedFiles,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    on_progress: Callable[[str], None],
    packed: bool,
    attn_implementation: str,
) -> PreTrainedModel:
    """The model of `config` on `device`, its linear layers packed if they are to be and can. Raises ConfigError."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    linear = {name for name, module in empty.named_modules() if type(module) is nn.Linear}
    kept = [layer for layer in files.layers.values() if packed and _WITH_PRODUCTS.fullmatch(layer.name)]
    kept = [layer for layer in kept if layer.name in linear]
    model, report = type(empty).from_pretrained(
        None,
        config=config,
        state_dict=files.state(dtype, {layer.name for layer in kept}),
        dtype=dtype,
        device_map={"": "cpu" if kept else device},  # what stays whole remains mapped until it is moved
        attn_implementation=attn_implementation,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # to name them
    )
    refuse_report(files.folder, report)
    whole = set(files.layers) - {layer.name for layer in kept if _put(model, layer.name, files.read(layer), device)}
    model.to(device)
    kinds = Counter(layer.words for layer in files.layers.values())
    told = ", ".join(f"{count} layers in {words}" for words, count in kinds.most_common())
    size = sum(rows * inner for rows, inner in (files.layers[name].shape for name in whole)) * dtype.itemsize
    unpacked = f", {len(whole)} of them unpacked to {dtype}" if whole else ""
    on_progress(
        f"{told}{unpacked}: {(size + _stored(model)) / GB:.2f} GB, in the files {files.stored_bytes() / GB:.2f}"
    )
    return model


@torch.no_grad()
def quantize_model(
    model: PreTrainedModel,
    kind: str,
    kept: str,
    device: torch.device,
    on_progress: Callable[[str], None],
    packed: bool,
) -> None:
    """Linear layers to `kind` (fp8, int4), one after the other, but for those whose names match `kept`; then the model
    is on `device`. Raises ConfigError for a layer that cannot be quantized, and when none is left."""
    patterns = [pattern.strip() for pattern in kept.split(",") if pattern.strip()]
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    if unknown := [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in layers)]:
        some = ", ".join(list(layers)[:3])
        raise ConfigError(f"engine.unquantized_layers: {unknown[0]!r} is no layer of this model; it has {some}, ...")
    chosen = {name: m for name, m in layers.items() if not any(fnmatchcase(name, pattern) for pattern in patterns)}
    if not chosen:
        raise ConfigError(f"engine.unquantized_layers: {kept!r} leaves nothing to quantize")
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, module in chosen.items():
        if id(module.weight) in shared:
            raise ConfigError(f"engine.quantization: {name} shares its weights with the embedding and must stay whole")
        weight = module.weight.data.to(device)
        if not bool(torch.isfinite(weight).all()):
            raise ConfigError(f"engine.quantization: {name} has weights that are not finite")
        quantized = _quantize(name, weight, kind)
        if packed and _WITH_PRODUCTS.fullmatch(name):
            _put(model, name, quantized, device)
        else:
            module.weight.data = quantized.dense(weight.dtype)
    model.to(device)
    size = _stored(model) or sum(module.weight.nbytes for module in chosen.values())
    again = "" if packed else " and unpacked again"
    on_progress(f"{len(chosen)} layers quantized to {kind.upper()}{again}: {size / GB:.2f} GB")


@torch.no_grad()
def unpack_model(model: PreTrainedModel, on_progress: Callable[[str], None]) -> None:
    """For transformers' own code, which has no kernels for packed weights: whole linear layers again."""
    packed = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    for name, module in packed.items():
        _put_whole(model, name, module.packed.dense(model.dtype), module.bias)
    if packed:
        size = sum(module.in_features * module.out_features for module in packed.values()) * model.dtype.itemsize
        on_progress(f"{len(packed)} layers unpacked to {model.dtype}: {size / GB:.2f} GB")


def _quantize(name: str, weight: torch.Tensor, kind: str) -> QuantizedWeight:
    if kind == "fp8":
        return quantize_fp8(weight)
    group = next((size for size in SPANS if weight.shape[1] % size == 0), None)
    if group is None:
        raise ConfigError(f"engine.quantization: {name} has {weight.shape[1]} inputs, no multiple of {SPANS[-1]}")
    return quantize_int4(weight, group)


def _put(model: PreTrainedModel, name: str, weight: QuantizedWeight, device: torch.device) -> bool:
    """`weight` in place of the linear layer `name`; whole, where our kernels have no tiles for it (False)."""
    bias = model.get_submodule(name).bias
    bias = bias.data.to(device) if isinstance(bias, torch.Tensor) else None
    weight = weight.to(device)
    try:
        model.set_submodule(name, PackedLinear(pack(weight), bias))
        return True
    except ValueError:
        _put_whole(model, name, weight.dense(model.dtype), bias)
        return False


def _put_whole(model: PreTrainedModel, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    model.set_submodule(name, linear)


def _stored(model: PreTrainedModel) -> int:
    """Bytes of packed weights."""
    return sum(module.packed.stored_bytes for module in model.modules() if isinstance(module, PackedLinear))
