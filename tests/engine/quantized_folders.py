"""Checkpoints as other tools write them, from a tiny model: each format by its description, code by code.

Every writer changes the model's own weights to what the stored values mean, so that the model is then the reference.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

Stored = dict[str, torch.Tensor]
E4M3 = torch.float8_e4m3fn


def tiny_model() -> PreTrainedModel:
    """Rows and columns that are no multiples of a block of (48, 40), and an output projection that is not square."""
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=128, initializer_range=0.3,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def write(
    folder: Path,
    model: PreTrainedModel,
    stated: dict[str, Any],
    store: Callable[[torch.Tensor], tuple[Stored, torch.Tensor]],
    whole: tuple[str, ...] = ("lm_head",),
    **more: torch.Tensor,
) -> None:
    """`store` gives the tensors of one weight [N, K], by the last part of their names, and what they mean, [N, K]."""
    tensors: Stored = dict(more)
    linear = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    quantized = {name: module for name, module in linear.items() if name not in whole}
    for name, module in quantized.items():
        parts, meant = store(module.weight.data)
        module.weight.data = meant.float()
        tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    taken = {f"{name}.weight" for name in quantized}
    tensors |= {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in taken}
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": stated}))


# -- 8-bit floats ----------------------------------------------------------------------------------------


def fp8_tensor(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """One scale for the whole tensor, and one for its input, which holds 112."""
    scale = weight.abs().max() / 448
    values = (weight / scale).to(E4M3)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.25)}, values.float() * scale


def fp8_channel(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
    """A scale an output, [N, 1], in the type of the model."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    values = (weight / scale.float()).clamp(-448, 448).to(E4M3)
    return {"weight": values, "weight_scale": scale}, values.float() * scale.float()


def fp8_block(down: int, across: int) -> Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]:
    """`weight_scale_inv`, which is multiplied, over blocks of rows and columns; those at the edges are smaller."""

    def store(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        values, meant = torch.empty_like(weight, dtype=E4M3), torch.empty_like(weight)
        scales = torch.empty(-(-weight.shape[0] // down), -(-weight.shape[1] // across))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                here = (slice(i * down, (i + 1) * down), slice(j * across, (j + 1) * across))
                scales[i, j] = weight[here].abs().max() / 448
                values[here] = (weight[here] / scales[i, j]).to(E4M3)
                meant[here] = values[here].float() * scales[i, j]
        return {"weight": values, "weight_scale_inv": scales}, meant

    return store


# -- four-bit integers -----------------------------------------------------------------------------------


def codes_of(weight: torch.Tensor, group_of: list[int], symmetric: bool) -> tuple[Any, Any, Any, torch.Tensor]:
    """Codes 0 to 15 [N, K], scales [N, G], zero points [N, G] and what they mean; column k is in group_of[k]."""
    rows, groups = weight.shape[0], max(group_of) + 1
    codes, meant = torch.empty_like(weight), torch.empty_like(weight)
    scales, zeros = torch.empty(rows, groups), torch.empty(rows, groups)
    for group in range(groups):
        columns = [k for k, g in enumerate(group_of) if g == group]
        part = weight[:, columns]
        if symmetric:
            scale, zero = part.abs().amax(1) / 7.5, torch.full((rows,), 8.0)
        else:  # GPTQ's first convention cannot store the zero point 0
            scale = (part.amax(1) - part.amin(1)) / 15
            zero = (-part.amin(1) / scale).round().clamp(1, 15)
        scale = scale.half().float()
        codes[:, columns] = (part / scale[:, None] + zero[:, None]).round().clamp(0, 15)
        meant[:, columns] = (codes[:, columns] - zero[:, None]) * scale[:, None]
        scales[:, group], zeros[:, group] = scale, zero
    return codes.int().numpy(), scales, zeros.int().numpy(), meant


def words(codes: Any, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[A, 8 * B] -> int32 [A, B]: bits 4i to 4i + 3 hold the code of column order[i] of eight."""
    packed = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for column in range(packed.shape[1]):
        for i in range(8):
            packed[:, column] |= (codes[:, 8 * column + order[i]] & 15).astype(np.uint32) << np.uint32(4 * i)
    return torch.from_numpy(packed.view(np.int32))


def by_group(inner: int, group: int, shuffled: bool = False) -> list[int]:
    group_of = [k // group for k in range(inner)]
    return np.random.default_rng(5).permutation(group_of).tolist() if shuffled else group_of


def compressed_int4(group: int, symmetric: bool, shuffled: bool = False) -> Callable[..., tuple[Stored, torch.Tensor]]:
    """Packed along K, zero points along N; signed values, stored plus 8. Without groups: one scale a row."""

    def store(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        group_of = by_group(weight.shape[1], group or weight.shape[1], shuffled)
        codes, scales, zeros, meant = codes_of(weight, group_of, symmetric)
        parts = {
            "weight_packed": words(codes),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts["weight_zero_point"] = words(zeros.T).T
        if shuffled:
            parts["weight_g_idx"] = torch.tensor(group_of, dtype=torch.int32)
        return parts, meant

    return store


def gptq(group: int, shuffled: bool, stored_zero: int, symmetric: bool = False) -> Callable[..., Any]:
    """Everything transposed, codes packed along K, zero points along N, `stored_zero` added to them."""

    def store(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        group_of = by_group(weight.shape[1], group, shuffled)
        codes, scales, zeros, meant = codes_of(weight, group_of, symmetric)
        return {
            "qweight": words(codes).T,
            "qzeros": words(zeros.T + stored_zero),
            "scales": scales.T.half(),
            "g_idx": torch.tensor(group_of, dtype=torch.int32),
        }, meant

    return store


def awq(group: int) -> Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]:
    """Transposed, codes and zero points packed along N, even columns first."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def store(weight: torch.Tensor) -> tuple[Stored, torch.Tensor]:
        codes, scales, zeros, meant = codes_of(weight, by_group(weight.shape[1], group), symmetric=False)
        return {"qweight": words(codes.T, order), "qzeros": words(zeros.T, order), "scales": scales.T.half()}, meant

    return store


# -- what their configurations state ---------------------------------------------------------------------


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme}, "ignore": ["lm_head"], **more}


def eight(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False, **more}


def four(group: int, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, **strategy, **more}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}
FORMATS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], tuple[Stored, torch.Tensor]]]] = {
    "compressed-tensors FP8 dynamic": (
        compressed(eight("channel"), eight("token", dynamic=True), format="float-quantized"),
        fp8_channel,
    ),
    "compressed-tensors FP8 static": (
        compressed(eight("tensor"), eight("tensor"), format="float-quantized"),
        fp8_tensor,
    ),
    "compressed-tensors INT4 g32": (compressed(four(32), format="pack-quantized"), compressed_int4(32, True)),
    "compressed-tensors INT4 a row": (compressed(four(0), format="pack-quantized"), compressed_int4(0, True)),
    "compressed-tensors INT4 zero points": (
        compressed(four(32, symmetric=False), format="pack-quantized"),
        compressed_int4(32, False),
    ),
    "compressed-tensors INT4 act order": (
        compressed(four(32, actorder="group"), format="pack-quantized"),
        compressed_int4(32, True, shuffled=True),
    ),
    "fine-grained FP8": (
        {"quant_method": "fp8", "weight_block_size": [48, 40], "activation_scheme": "dynamic", "fmt": "e4m3"},
        fp8_block(48, 40),
    ),
    "FP8 by tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "ModelOpt FP8": ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, fp8_tensor),
    "GPTQ": ({**GPTQ, "desc_act": False}, gptq(32, False, stored_zero=-1)),
    "GPTQ symmetric": ({**GPTQ, "desc_act": False, "sym": True}, gptq(32, False, stored_zero=-1, symmetric=True)),
    "GPTQ act order": ({**GPTQ, "desc_act": True}, gptq(32, True, stored_zero=-1)),
    "GPTQ version 2": ({**GPTQ, "desc_act": True, "checkpoint_format": "gptq_v2"}, gptq(32, True, stored_zero=0)),
    "AWQ": (
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        awq(32),
    ),
}


def fp8_rows(weight: torch.Tensor) -> torch.Tensor:
    """What is left of a weight with a float32 scale a row."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scale).clamp(-448, 448).to(E4M3).float() * scale
