"""A model from quantized files, and a quantized model from whole weights (`engine.quantization`).

Owns which layers are which, what is said about it and what is refused. A CPU has no kernels for packed weights: there
they are unpacked at load, or quantized and unpacked again, so that answers are those of the quantized model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ....contracts.errors import ConfigError
from ..weight_names import refuse_report
from .files import QuantizedFiles
from .weight import quantize_fp8

GB = 1e9


def load_quantized(
    files: QuantizedFiles,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    on_progress: Callable[[str], None],
    **options: Any,
) -> PreTrainedModel:
    """The model of `config`, `options` going to transformers' `from_pretrained`. Raises ConfigError."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, attn_implementation=options.get("attn_implementation"))
    model, report = type(empty).from_pretrained(
        None,
        config=config,
        state_dict=files.state(dtype, ()),
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # to name them
        **options,
    )
    refuse_report(files.folder, report)
    on_progress(_unpacked(files, dtype))
    return model


def _unpacked(files: QuantizedFiles, dtype: torch.dtype) -> str:
    kinds = Counter(layer.words for layer in files.layers.values())
    told = ", ".join(f"{count} layers in {words}" for words, count in kinds.most_common())
    whole = sum(rows * inner for rows, inner in (layer.shape for layer in files.layers.values())) * dtype.itemsize
    return f"{told}: unpacked to {dtype}, {whole / GB:.2f} GB instead of {files.stored_bytes() / GB:.2f}"


@torch.no_grad()
def quantize_model(model: PreTrainedModel, kept: str, on_progress: Callable[[str], None]) -> None:
    """Linear layers to FP8 with a scale a row, one after the other, but for those whose names match `kept`.

    Raises ConfigError for a layer that cannot be quantized, and when none is left.
    """
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
        if not bool(torch.isfinite(module.weight).all()):
            raise ConfigError(f"engine.quantization: {name} has weights that are not finite")
        module.weight.data = quantize_fp8(module.weight.data).dense(module.weight.dtype)
    values = sum(module.weight.numel() for module in chosen.values())
    dtype = next(iter(chosen.values())).weight.dtype
    on_progress(
        f"{len(chosen)} layers quantized to FP8, one scale a row, and unpacked: {dtype.itemsize * values / GB:.2f} GB"
    )
