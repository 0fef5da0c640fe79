"""The type in which K and V are cached, and the way into and out of it.

FP8 (e4m3) has no scales: K and V lie well inside its range (docs/quantization.md has the measurement), and what lies
beyond is cut to its largest value. A chunk's queries read the K and V of their own chunk as they were stored, so that
answers do not depend on how a prompt was cut or on what a cache held of it.
"""

from __future__ import annotations

import torch

from ...contracts.errors import ConfigError

FP8 = torch.float8_e4m3fn
FP8_MOST = 448.0  # the kernels know it as well
FP8_CAPABILITY = (8, 9)  # the first GPUs that convert it
_TYPES = {"bf16": torch.bfloat16, "fp8_e4m3": FP8}


def resolve_kv_type(setting: str, model_type: torch.dtype, device: torch.device) -> torch.dtype:
    """`setting` is `engine.kv_dtype`. Raises ConfigError where the device cannot convert what was asked for."""
    if setting == "auto":
        return model_type
    if setting == "fp8_e4m3" and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < FP8_CAPABILITY:
            raise ConfigError(
                f"engine.kv_dtype: given fp8_e4m3, allowed on {torch.cuda.get_device_name(device)}: auto, bf16; "
                f"FP8 needs compute capability {'.'.join(map(str, FP8_CAPABILITY))}, this GPU has "
                f"{'.'.join(map(str, capability))}"
            )
    return _TYPES[setting]


def as_cached(values: torch.Tensor, kv_type: torch.dtype) -> torch.Tensor:
    """As the cache holds them. NaN stays NaN."""
    return (values.clamp(-FP8_MOST, FP8_MOST) if kv_type == FP8 else values).to(kv_type)


def movable(cache: torch.Tensor) -> torch.Tensor:
    """The same bytes as a type that every operation can copy: not all know FP8."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache
