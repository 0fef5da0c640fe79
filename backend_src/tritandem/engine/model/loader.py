"""Weights into memory: a Hugging Face folder, a GGUF file, a hub id, or random weights from a config.

Owns where the files come from and which dtype they get. The modelling code is transformers' own; whether
it can be served is `support.py`'s verdict. Runs in the loading thread. Knows nothing about requests.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...config import EngineConfig
from ...contracts.errors import ConfigError
from ...machine.device import DeviceGroup
from ...model_facts.folder import read_folder
from ...model_facts.gguf_header import GgufHeader, read_gguf
from ...model_facts.quantization import CACHE_KIND, MXFP4, in_mxfp4, refuse_twice
from ...model_facts.token_ids import check_token_ids
from ...model_facts.weight_files import read_weights
from ..attention.kv_type import FP8, resolve_kv_type
from ..parallel.interface import Rank
from .gguf.config import gguf_config
from .gguf.model import check_gguf, load_gguf, unpacked_words
from .packed import ATTENTION_NAME, LayerShape
from .part_files import load_part
from .quantized.files import QuantizedFiles, quantized_files
from .quantized.kv_scales import use_cache_scales
from .quantized.loading import load_quantized, quantize_model
from .share import Share
from .states.cache import state_bytes
from .support import UnsupportedModel, check_config, inspect_model, stated_context
from .weight_names import refuse_report

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is known to be servable, on its device, in inference mode."""

    model: PreTrainedModel
    layers: list[LayerShape]
    vocab_size: int
    max_context_tokens: int  # the model's own limit

    @property
    def state_bytes(self) -> int:
        """What layers with a state keep of each sequence; 0 for a model of attention alone."""
        return state_bytes(self.model)

    def served_context(self, config: EngineConfig, num_blocks: int) -> int:
        """Tokens of one sequence at most: the model's, the setting's, and what all blocks but the null block hold."""
        limits = (self.max_context_tokens, config.max_context_tokens, (num_blocks - 1) * config.block_tokens)
        return min(limit for limit in limits if limit)


def resolve_devices(name: str) -> list[torch.device]:
    """Of every rank, one in most cases. `auto` is CUDA where there is one. Raises ConfigError for a device that is not
    there."""
    try:
        members = DeviceGroup.parse(name).members
    except ValueError as error:
        raise ConfigError(f"engine.device: {error}") from None
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if members[0].kind == "auto":
        return [torch.device("cuda" if gpus else "cpu")]
    for device in members:
        if device.kind == "cuda" and device.number >= gpus:
            raise ConfigError(f"engine.device: {device} is not there; this process sees {gpus} CUDA devices")
    return [torch.device(str(device)) for device in members]


def resolve_device(name: str) -> torch.device:
    """The first of `resolve_devices`."""
    return resolve_devices(name)[0]


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """float32 on CPUs, where bfloat16 is emulated and slow; bfloat16 on CUDA. Raises ConfigError."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"engine.dtype: given {name!r}, allowed: auto, {', '.join(sorted(_DTYPES))}")
    return _DTYPES[name]


def load_model(path: Path, config: EngineConfig, on_progress: Callable[[str], None]) -> LoadedModel:
    """Load and check. Raises ConfigError (UnsupportedModel among them) with the reason."""
    model, _ = load_weights(path, config, resolve_device(config.device), on_progress)
    return inspected(model, on_progress)


def load_weights(
    path: Path,
    config: EngineConfig,
    device: torch.device,
    on_progress: Callable[[str], None],
    rank: Rank | None = None,
) -> tuple[PreTrainedModel, Share | None]:
    """A model on `device`, or the part of it that `rank` holds, and which part that is. Raises ConfigError."""
    dtype = resolve_dtype(config.dtype, device)
    on_progress(f"reading the configuration of {path.name}")
    if path.is_dir():
        check_token_ids(read_folder(path))
        if not config.random_weights:
            values, stored = in_mxfp4(read_weights(path) or {})
            if values:
                size = f"{values * dtype.itemsize / 1e9:.2f} GB, in the files {stored / 1e9:.2f}"
                on_progress(f"experts in MXFP4 are unpacked to {dtype}: {size}")
    header = read_gguf(path) if path.suffix == ".gguf" else None
    model_config, stated = _read_config(path, header)
    files = None if config.random_weights else quantized_files(path, stated)
    refuse_twice(config.quantization, files.quantization if files is not None else None, str(path))
    share = Share(model_config, rank) if rank is not None else None
    if share is not None and (files is not None or config.quantization != "none"):
        given = config.quantization if files is None else files.quantization.method
        raise ConfigError(f"engine.quantization over several ranks: given {given}, allowed: none")
    on_progress(f"loading weights as {dtype} on {device}")
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": ATTENTION_NAME}
    model = _build(model_config, options, device, config, path, header, files, share, on_progress)
    model.eval().requires_grad_(False)
    if config.quantization != "none":
        kind, kept = config.quantization, config.unquantized_layers
        quantize_model(model, kind, kept, device, on_progress, packed=device.type == "cuda")
    if files is not None:
        _use_cache_scales(model, files, resolve_kv_type(config.kv_dtype, dtype, device), on_progress)
    return model, share


def inspected(model: PreTrainedModel, on_progress: Callable[[str], None]) -> LoadedModel:
    """With what it takes to serve it. Raises UnsupportedModel."""
    context_tokens = fix_rotary_context(model)
    on_progress("checking that its attention can be served")
    layers = inspect_model(model)
    text = model.config.get_text_config()
    loaded = LoadedModel(model, layers, text.vocab_size, context_tokens)
    if loaded.state_bytes:
        on_progress(
            f"layers keep {loaded.state_bytes / 2**20:.1f} MiB of each sequence: no prefix cache for this model"
        )
    return loaded


def _use_cache_scales(
    model: PreTrainedModel, files: QuantizedFiles, kv_type: torch.dtype, on_progress: Callable[[str], None]
) -> None:
    """Those of a checkpoint, with an FP8 cache; what becomes of them is said. Raises ConfigError."""
    scales = files.cache_scales()
    if not scales:
        return
    if kv_type != FP8:
        reason: str | None = f"the KV cache is {kv_type}; engine.kv_dtype fp8_e4m3 uses them"
    elif files.quantization.cache != CACHE_KIND:
        reason = f"they are for {files.quantization.cache}"
    else:
        reason = use_cache_scales(model, scales)
    told = "are part of its weights, as powers of two" if reason is None else f"are not used: {reason}"
    on_progress(f"calibrated scales of the KV cache of {len(scales)} layers {told}")


def _read_config(path: Path, header: GgufHeader | None) -> tuple[PreTrainedConfig, Any]:
    """The configuration of a folder, a GGUF file or a hub id, of a kind that can be served, and the part of it that
    says how weights are quantized, of which transformers is told nothing. Raises ConfigError."""
    if header is not None:
        config = gguf_config(header)
    else:
        try:
            config = AutoConfig.from_pretrained(_source(path), local_files_only=path.is_dir())
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"{path}: no readable model configuration: {error}") from error
    check_config(config)
    if config.get_text_config() is not config:
        check_config(config.get_text_config())
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(f"{config.model_type}: transformers has no causal language model of this type")
    if _unpack_mxfp4(config):
        return config, None
    stated = [vars(part).pop("quantization_config", None) for part in (config, config.get_text_config())]
    return config, stated[0] or stated[1]


def _unpack_mxfp4(config: PreTrainedConfig) -> bool:
    """Experts in MXFP4 (gpt-oss) are unpacked by transformers while they are loaded; whether there are any."""
    stated = getattr(config, "quantization_config", None)
    if not isinstance(stated, dict) or stated.get("quant_method") != MXFP4:
        return False
    config.quantization_config = {**stated, "dequantize": True}
    return True


def check_model(path: Path) -> None:
    """Everything about a folder or GGUF file that makes `load_model` refuse it and that needs no weight's value: what
    its attention computes is left to be seen. Raises ConfigError."""
    header = read_gguf(path) if path.suffix == ".gguf" else None
    config, stated = _read_config(path, header)
    files = quantized_files(path, stated)
    try:
        if header is not None:
            check_gguf(header, config, attn_implementation=ATTENTION_NAME)
            return
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME)
    except KeyError as error:
        _refuse_attention(config, error)
        raise
    weights = read_weights(path)
    if weights is None:
        return
    shapes = {name: weight.shape for name, weight in weights.items()} if files is None else files.shapes()
    _, report = type(empty).from_pretrained(
        None,
        config=empty.config,  # of the text part, where the files' has others
        state_dict={name: torch.empty(shape, device="meta") for name, shape in shapes.items()},
        device_map={"": "meta"},
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    refuse_report(path, report)


def _refuse_attention(config: PreTrainedConfig, error: KeyError) -> None:
    """Raises UnsupportedModel for the error of modelling code that looks for our attention in a list of its own."""
    if error.args == (ATTENTION_NAME,):
        reason = "its modelling code does not use transformers' attention interface"
        raise UnsupportedModel(f"{config.model_type}: {reason}") from None


def _source(path: Path) -> str:
    """What `from_pretrained` takes: a folder or a hub id."""
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"{path}: has no config.json")
        return str(path)
    text = os.fspath(path)
    if path.is_absolute() or text.count("/") > 1 or text.startswith("."):
        raise ConfigError(f"{path}: no such model folder or file")
    return text


def _build(
    model_config: PreTrainedConfig,
    options: dict[str, Any],
    device: torch.device,
    config: EngineConfig,
    path: Path,
    header: GgufHeader | None,
    files: QuantizedFiles | None,
    share: Share | None,
    on_progress: Callable[[str], None],
) -> PreTrainedModel:
    try:
        if share is not None and header is None:
            return load_part(share, path, model_config, device, config, options)
        if config.random_weights:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), device:
                torch.manual_seed(config.random_weights_seed)
                return AutoModelForCausalLM.from_config(model_config, **options)
        on_cuda = device.type == "cuda"
        options["device_map"] = {"": device if config.quantization == "none" else "cpu"}
        if header is not None:
            if (told := unpacked_words(header, options["dtype"])) is not None:
                on_progress(told)
            return load_gguf(header, model_config, share=share, **options)
        if files is not None:
            return load_quantized(files, model_config, options["dtype"], device, on_progress, on_cuda, ATTENTION_NAME)
        model, report = AutoModelForCausalLM.from_pretrained(
            _source(path),
            config=model_config,
            local_files_only=path.is_dir(),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to name them
            **options,
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"{path}: the weights do not fit into the memory of {device}") from error
    except KeyError as error:
        _refuse_attention(model_config, error)
        raise ConfigError(f"{path}: {model_config.model_type} cannot be loaded: {error!r}") from error
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{path}: {model_config.model_type} cannot be loaded: {error}") from error
    refuse_report(path, report)
    return model


def fix_rotary_context(model: PreTrainedModel) -> int:
    """The model's context limit; stops rotary embeddings that rescale themselves as a batch grows.

    `dynamic` and `longrope` choose their frequencies by the longest position of the whole batch, which would
    let one request change another's text. They are held at the frequencies of the original training length,
    and the context ends there.
    """
    for module in model.modules():
        if getattr(module, "rope_type", None) in ("dynamic", "longrope"):
            module.rope_type = "default"
    return stated_context(model.config.get_text_config())
