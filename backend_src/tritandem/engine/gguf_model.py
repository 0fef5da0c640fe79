"""A model from a GGUF file, which holds every weight of it and nothing else: what is missing, left over or turned by
other frequencies is refused by name. transformers' own loader fills gaps with random numbers and drops the rest.

How each architecture's weights are laid out is transformers' knowledge, how types are unpacked that of gguf.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from ..contracts import ConfigError
from ..model_facts.gguf_header import GgufHeader, GgufTensor, kind_name, read_gguf, tensor_bytes
from .gguf_config import gguf_config, local_base, rotary_dimensions
from .gguf_rope import FACTORS, LONG_FACTORS, SHORT_FACTORS, frequencies, read_factors
from .weight_names import refuse_names, refuse_report

_FREQUENCIES = {FACTORS, SHORT_FACTORS, LONG_FACTORS}  # in the configuration, not among the weights


def read_gguf_config(path: Path) -> PreTrainedConfig:
    """Raises ConfigError naming what the header says and transformers cannot."""
    header = read_gguf(path)
    return gguf_config(path, header, read_factors(path, header))


def load_gguf(
    path: Path, config: PreTrainedConfig, dtype: torch.dtype = torch.float32, **options: Any
) -> PreTrainedModel:
    """The model of `config`, which is `read_gguf_config(path)`, with the file's weights: in float32 no digit of an
    unpacked value is lost. `options` go to transformers' `from_pretrained`. Raises ConfigError."""
    header = read_gguf(path)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    model, report = type(empty).from_pretrained(
        None,
        config=config,
        state_dict=_read_weights(path, header, empty, dtype),
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # to name them
        **options,
    )
    refuse_report(path, report)
    _check_frequencies(path, header, model)
    return model


def _read_weights(
    path: Path, header: GgufHeader, model: PreTrainedModel, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Every tensor of the file under the model's names. Raises ConfigError for those that the model has no use for."""
    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    names = _model_names(header, model, processor)
    weights: dict[str, torch.Tensor] = {}
    unused = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        for tensor in header.tensors:
            # Stacked experts go by a name without the suffix, and more than one into one weight.
            if tensor.name not in names and tensor.name.removesuffix(".weight") not in names:
                unused += [] if tensor.name in _FREQUENCIES else [tensor.name]
                continue
            result = processor.process(
                weights=_unpack(path, data, tensor),
                name=tensor.name,
                tensor_key_mapping=names,
                parsed_parameters={"tensors": weights},
            )
            if result.name is not None:
                weights[names[result.name]] = torch.from_numpy(np.array(result.weights)).to(dtype)
    refuse_names(path, "are not used by the model that its header describes", unused)
    return weights


def _unpack(path: Path, data: mmap.mmap, tensor: GgufTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
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


def _check_frequencies(path: Path, header: GgufHeader, model: PreTrainedModel) -> None:
    """Every rotary embedding turns as the file says. Raises ConfigError."""
    values, dimensions = header.of_architecture(), rotary_dimensions(header)
    wanted = frequencies(values, read_factors(path, header), dimensions)
    local = frequencies({"rope.freq_base": local_base(header)}, {}, dimensions)
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            said = local if "sliding_attention" in name else wanted
            built = buffer.detach().to("cpu", torch.float64).numpy()
            if built.shape != said.shape or not np.allclose(built, said, rtol=1e-5, atol=0):
                kind = model.config.model_type
                raise ConfigError(f"{path}: transformers' {kind} cannot turn positions as the file says ({name})")
