"""A model from a GGUF file, which holds every weight of it and nothing else: what is missing, left over or turned by
other frequencies is refused by name. transformers' own loader fills gaps with random numbers and drops the rest.

How each architecture's weights are laid out is transformers' knowledge, how types are unpacked that of gguf.
"""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from ....contracts.errors import ConfigError
from ....model_facts.gguf_header import GgufHeader, GgufTensor, kind_name, tensor_bytes
from ..share import Share
from ..weight_names import refuse_names, refuse_report
from .config import local_base, rotary_dimensions
from .rope import FACTORS, LONG_FACTORS, SHORT_FACTORS, frequencies, read_factors

_FREQUENCIES = {FACTORS, SHORT_FACTORS, LONG_FACTORS}  # in the configuration, not among the weights


def load_gguf(
    header: GgufHeader,
    config: PreTrainedConfig,
    dtype: torch.dtype = torch.float32,
    share: Share | None = None,
    **options: Any,
) -> PreTrainedModel:
    """The model of `config`, which is `gguf_config(header)`, with the file's weights: in float32 no digit of an
    unpacked value is lost. `share`: one rank's part of it. `options` go to transformers' `from_pretrained`. Raises
    ConfigError."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    whole = type(empty)
    model, report = (whole if share is None else share.model_class(whole)).from_pretrained(
        None,
        config=config,
        state_dict=_read_weights(header, empty, dtype, share),
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # to name them
        **options,
    )
    refuse_report(header.path, report)
    _check_frequencies(header, model)
    return model


def unpacked_words(header: GgufHeader, dtype: torch.dtype) -> str | None:
    """What was unpacked to which size; None for a file of floats."""
    packed = [tensor for tensor in header.tensors if kind_name(tensor.kind).startswith(("Q", "IQ", "TQ", "MXFP4"))]
    if not packed:
        return None
    kinds = Counter(kind_name(tensor.kind) for tensor in packed)
    told = ", ".join(f"{count} tensors in {kind}" for kind, count in kinds.most_common())
    size, stored = sum(tensor.elements for tensor in packed) * dtype.itemsize, sum(map(tensor_bytes, packed))
    return f"{told} unpacked to {dtype}: {size / 1e9:.2f} GB, in the file {stored / 1e9:.2f}"


def check_gguf(header: GgufHeader, config: PreTrainedConfig, **options: Any) -> None:
    """Everything that `load_gguf` refuses and that can be told without the weights. Raises ConfigError."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, **options)
    processor = _processor(header, model)
    names = _model_names(header, model, processor)
    made = {names[key] for tensor in header.tensors if (key := _key(tensor, names)) is not None}
    needed = {processor.preprocess_name(weight) for weight in model.state_dict()} - set(model.all_tied_weights_keys)
    refuse_names(header.path, "are missing", needed - made)
    _refuse_unused(header, names)


def _processor(header: GgufHeader, model: PreTrainedModel) -> TensorProcessor:
    return TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())


def _key(tensor: GgufTensor, names: Mapping[str, str]) -> str | None:
    """Under which `names` has it: stacked experts go by a name without the suffix, and several into one weight."""
    return next((key for key in (tensor.name, tensor.name.removesuffix(".weight")) if key in names), None)


def _refuse_unused(header: GgufHeader, names: Mapping[str, str]) -> None:
    without = [tensor.name for tensor in header.tensors if _key(tensor, names) is None]
    unused = set(without) - _FREQUENCIES
    refuse_names(header.path, "are not used by the model that its header describes", unused)


def _read_weights(
    header: GgufHeader, model: PreTrainedModel, dtype: torch.dtype, share: Share | None
) -> dict[str, torch.Tensor]:
    """Every tensor of the file, or what a rank has of it, under the model's names. Raises ConfigError for those that
    the model has no use for."""
    processor = _processor(header, model)
    names = _model_names(header, model, processor)
    _refuse_unused(header, names)
    weights: dict[str, torch.Tensor] = {}
    with header.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for tensor in header.tensors:
            if _key(tensor, names) is None:
                continue
            result = processor.process(
                weights=_unpack(header.path, data, tensor),
                name=tensor.name,
                tensor_key_mapping=names,
                parsed_parameters={"tensors": weights},
            )
            if result.name is not None:
                name, weight = names[result.name], torch.from_numpy(np.array(result.weights))
                part = weight if share is None else share.part(name, weight)
                if part is not None:
                    weights[name] = part.to(dtype, copy=share is not None)
    return weights


def _unpack(path: Path, data: mmap.mmap, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    import gguf  # here and below: only whoever has such a file needs it

    raw = np.frombuffer(data, np.uint8, tensor_bytes(tensor), tensor.offset).copy()  # the map is closed afterwards
    try:
        kind = gguf.GGMLQuantizationType(tensor.kind)
        unpacked = gguf.dequantize(raw.reshape(*tensor.shape[:-1], -1), kind)
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"{path}: {tensor.name} is of type {kind_name(tensor.kind)}, which gguf cannot unpack"
        ) from error
    return np.asarray(unpacked, np.float32)


def _model_names(header: GgufHeader, model: PreTrainedModel, processor: TensorProcessor) -> dict[str, str]:
    """The model's name of each tensor that its weights are made of."""
    import gguf

    [architecture] = [key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == header.architecture]
    known = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    names: dict[str, str] = {}
    for weight in model.state_dict():
        weight = processor.preprocess_name(weight)
        stem, dot, suffix = weight.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, dot, suffix = weight, "", ""
        if (name := known.get_name(stem)) is not None:
            names[name + dot + suffix] = weight
        else:
            processor.perform_fallback_tensor_mapping(names, dot + suffix, "", weight)
    return names


def _check_frequencies(header: GgufHeader, model: PreTrainedModel) -> None:
    """Every rotary embedding turns as the file says. Raises ConfigError."""
    values, dimensions = header.of_architecture(), rotary_dimensions(header)
    wanted = frequencies(values, read_factors(header), dimensions)
    local = frequencies({"rope.freq_base": local_base(header)}, {}, dimensions)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            said = local if "sliding_attention" in name else wanted
            built = buffer.detach().to("cpu", torch.float64).numpy()
            if built.shape != said.shape or not np.allclose(built, said, rtol=1e-5, atol=0):
                kind = model.config.model_type
                raise ConfigError(
                    f"{header.path}: transformers' {kind} cannot turn positions as the file says ({name})"
                )
