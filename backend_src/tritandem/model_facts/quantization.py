"""How a model's weights are quantized: what its configuration states, and which tensors of its files make each layer.

The configuration names the kind, which is served or refused; the tensors say the rest, layer by layer, so that lists of
layers that were left out need no reading. Knows names, types and shapes only: `engine/model/quantized` has the values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from ..contracts.errors import ConfigError
from .folder import ModelFolder, read_json
from .weight_files import Weight

SERVED = "compressed-tensors (FP8, INT4), fp8 (by block or tensor), modelopt (FP8), gptq (4 bits), awq (4 bits, gemm)"
MXFP4 = "mxfp4"  # gpt-oss: transformers' loader unpacks its experts, for it the model is whole
MODELOPT = "hf_quant_config.json"  # where ModelOpt writes what newer exports repeat in config.json
CACHE_KIND = "8-bit float"  # of cached keys and values whose scales are served
CODES_A_WORD = 8  # of four bits
_SCALES_OF_INPUTS = ("input_scale", "activation_scale")
# Queries and probabilities are not rounded, nor what a layer puts out; of cached keys and values see `CACHE_SCALE`.
_UNUSED = (*_SCALES_OF_INPUTS, "output_scale", "k_scale", "v_scale", "q_scale", "prob_output_scale", "kv_scale")
CACHE_SCALE = re.compile(
    r"(?P<attention>.+?)\.(?:(?P<both>kv_scale)|(?P<of>[kv])_scale|(?P<by>[kv])_proj\.(?:[kv]_scale|output_scale))"
)
_PARTS = {
    "fp8": ("weight", "weight_scale", "weight_scale_inv", *_SCALES_OF_INPUTS),
    "compressed": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "awq": ("qweight", "qzeros", "scales"),
}


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the configuration states. `zero_shift`: what a stored zero point lacks (GPTQ's first convention: 1).
    `block`: rows and columns that share an FP8 scale, where it is neither the tensor's nor a row's. `cache`: the type
    that scales of cached keys and values are for."""

    method: str
    zero_shift: int = 0
    block: tuple[int, int] = (128, 128)
    cache: str = CACHE_KIND


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One layer's weight [N, K] in a file. `parts`: by the format's own name of a part, the tensor's full name."""

    name: str
    layout: str  # fp8, compressed, gptq, awq
    parts: Mapping[str, str]
    shape: tuple[int, int]
    group: int  # neighbours along K with one scale; K: one a row, or one for the whole tensor

    @property
    def groups(self) -> int:
        return ceil(self.shape[1] / self.group)

    @property
    def words(self) -> str:
        bits = "FP8" if self.layout == "fp8" else "INT4"
        return f"{bits}, {'one scale a row' if self.groups == 1 else f'groups of {self.group}'}"


def read_quantization(folder: ModelFolder) -> Quantization | None:
    """None: not quantized, or of a kind (MXFP4) that counts as whole here. Raises ConfigError naming one not served."""
    stated = folder.config.get("quantization_config") or folder.text.get("quantization_config")
    if not stated:
        stated = _modelopt(read_json(folder.path / MODELOPT))
    if not stated or stated.get("quant_method") == MXFP4:
        return None
    return quantization_of(stated, str(folder.path))


def refuse_twice(setting: str, quantization: Quantization | None, where: str) -> None:
    """Raises ConfigError for `engine.quantization` of a model that is quantized already."""
    if quantization is not None and setting != "none":
        reason = f"{where} is quantized already, by {quantization.method}"
        raise ConfigError(f"engine.quantization: given {setting}, allowed: none; {reason}")


def quantization_of(stated: Mapping[str, Any], where: str) -> Quantization:
    """Of a `quantization_config`. Raises ConfigError."""
    method = str(stated.get("quant_method", "")).lower().replace("_", "-")
    match method:
        case "compressed-tensors":
            return _compressed(stated, where)
        case "fp8":
            _refuse(where, method, stated.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"), f"{stated.get('fmt')}")
            return Quantization(method, block=_block(stated.get("weight_block_size"), where))
        case "modelopt":
            algorithm = str(stated.get("quant_algo", "")).upper()
            _refuse(where, method, algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"), algorithm)
            return Quantization(method)
        case "gptq":
            _refuse(where, method, stated.get("bits") != 4, f"{stated.get('bits')} bits")
            layout = stated.get("checkpoint_format", "gptq")
            _refuse(where, method, layout not in ("gptq", "gptq_v2"), f"checkpoint_format {layout}")
            return Quantization(method, zero_shift=1 if layout == "gptq" else 0)
        case "awq":
            _refuse(where, method, stated.get("bits", stated.get("w_bit")) != 4, f"{stated.get('bits')} bits")
            version = str(stated.get("version", "gemm")).lower()
            _refuse(where, method, version != "gemm", f"version {version}")
            _refuse(where, method, not stated.get("zero_point", True), "without zero points")
            return Quantization(method)
    raise ConfigError(f"{where}: quantized by {method or 'an unnamed method'!r}, which is not served; served: {SERVED}")


def stored_layers(
    weights: Mapping[str, Weight], quantization: Quantization, where: str
) -> tuple[dict[str, StoredLayer], list[str]]:
    """The quantized layers by name, and the tensors that are whole weights as they stand.

    Raises ConfigError that names the layer and what about it is not served.
    """
    layers = {layer.name: layer for layer in _layers(weights, quantization, where)}
    taken = {name for layer in layers.values() for name in layer.parts.values()}
    plain = [name for name in weights if name not in taken and name.rpartition(".")[2] not in _UNUSED]
    return layers, plain


def _layers(weights: Mapping[str, Weight], quantization: Quantization, where: str) -> Iterator[StoredLayer]:
    for name, weight in weights.items():
        layer, _, part = name.rpartition(".")
        layout = ""
        if part == "weight" and weight.kind.startswith("F8"):
            layout = "fp8"
        elif part == "weight_packed":
            layout = "compressed"
        elif part == "qweight":
            layout = quantization.method
        elif part == "weight" and weight.kind in ("I8", "U8", "I32", "F4"):
            raise ConfigError(f"{where}: {layer}: weights of type {weight.kind} are not served; served: {SERVED}")
        if layout in _PARTS:
            parts = {part: f"{layer}.{part}" for part in _PARTS[layout] if f"{layer}.{part}" in weights}
            try:
                yield _layer(layer, layout, parts, {part: weights[full] for part, full in parts.items()}, quantization)
            except (ValueError, KeyError) as error:
                reason = f"has no {error.args[0]}" if isinstance(error, KeyError) else error
                raise ConfigError(f"{where}: {layer}: {reason}") from None


def _layer(
    name: str, layout: str, parts: Mapping[str, str], held: Mapping[str, Weight], quantization: Quantization
) -> StoredLayer:
    """Raises ValueError with what does not fit, KeyError with the part that is missing."""
    if layout == "fp8":
        _expect(held["weight"].kind == "F8_E4M3", f"8-bit floats of type {held['weight'].kind} are not served")
        rows, inner = _two(held["weight"], "weight")
        scale = held["weight_scale_inv"] if "weight_scale_inv" in held else held["weight_scale"]
        for part in set(_SCALES_OF_INPUTS) & set(held):
            given = held[part].elements
            _expect(given == 1, f"{part} has {given} values; one for all of a layer's inputs is served")
        down, across = quantization.block
        if scale.elements == 1 or scale.shape in ((rows,), (rows, 1)):
            across = inner
        else:
            wanted = (ceil(rows / down), ceil(inner / across))
            _expect(scale.shape == wanted, f"scales {scale.shape} for weights {(rows, inner)}: expected {wanted}")
        return StoredLayer(name, layout, parts, (rows, inner), across)
    if layout == "compressed":
        kind = held["weight_packed"].kind
        _expect(kind == "I32", f"packed weights of type {kind} (4-bit floats) are not served")
        rows, words = _two(held["weight_packed"], "weight_packed")
        scale_rows, groups = _two(held["weight_scale"], "weight_scale")
        inner = words * CODES_A_WORD
        _expect(scale_rows == rows, f"scales for {scale_rows} rows, weights have {rows}")
        if "weight_zero_point" in held:
            wanted = (ceil(rows / CODES_A_WORD), groups)
            zeros = _two(held["weight_zero_point"], "weight_zero_point")
            _expect(zeros == wanted, f"zero points {zeros}: expected {wanted}")
        held["weight_shape"]
    else:
        (down, across), scales = _two(held["qweight"], "qweight"), _two(held["scales"], "scales")
        zeros = _two(held["qzeros"], "qzeros")
        inner, rows = (down * CODES_A_WORD, across) if layout == "gptq" else (down, across * CODES_A_WORD)
        groups = scales[0]
        _expect(scales[1] == rows, f"scales for {scales[1]} outputs, weights have {rows}")
        wanted = (groups, ceil(rows / CODES_A_WORD))
        _expect(zeros == wanted, f"zero points {zeros}: expected {wanted}")
        if "g_idx" in held:
            given = held["g_idx"].elements
            _expect(given == inner, f"not four bits a weight: {given} inputs lie in {down} rows of 32 bits")
    _expect(inner % groups == 0, f"{inner} inputs cannot be cut into {groups} groups")
    return StoredLayer(name, layout, parts, (rows, inner), inner // groups)


def _compressed(stated: Mapping[str, Any], where: str) -> Quantization:
    method = "compressed-tensors"
    groups = stated.get("config_groups") or {}
    _refuse(where, method, not groups, "without config_groups")
    _refuse(where, method, bool((stated.get("sparsity_config") or {}).get("format") not in (None, "dense")), "sparsity")
    _refuse(where, method, bool((stated.get("transform_config") or {}).get("config_groups")), "with transforms")
    block = None
    for name, group in groups.items():
        weights = group.get("weights") or {}
        bits, kind = weights.get("num_bits"), weights.get("type", "int")
        told = f"{name}: {bits}-bit {kind} weights, format {group.get('format') or stated.get('format')}"
        _refuse(where, method, (bits, kind) not in ((8, "float"), (4, "int")), told)
        strategy = weights.get("strategy")
        allowed = ("tensor", "channel", "block") if kind == "float" else ("channel", "group")
        _refuse(where, method, strategy not in allowed, f"{told}, strategy {strategy}")
        activations = group.get("input_activations") or {}
        kinds = (activations.get("num_bits", bits), activations.get("type", kind))
        _refuse(where, method, kinds != (bits, kind), f"{told}, activations of {kinds[0]}-bit {kinds[1]}")
        _refuse(where, method, bool(activations) and kind == "int", f"{told}, quantized activations")
        block = weights.get("block_structure") if strategy == "block" else block
    cache = stated.get("kv_cache_scheme") or {}
    kind = f"{cache.get('num_bits', 8)}-bit {cache.get('type', 'float')}"
    return Quantization(method, block=_block(block, where), cache=kind)


def cache_scales(weights: Mapping[str, Weight]) -> dict[str, dict[str, str]]:
    """By the name of an attention module: the full names of its scales of cached `k` and `v`."""
    found: dict[str, dict[str, str]] = {}
    for name in weights:
        if match := CACHE_SCALE.fullmatch(name):
            kinds = ("k", "v") if match["both"] else (match["of"] or match["by"],)
            found.setdefault(match["attention"], {}).update(dict.fromkeys(kinds, name))
    return found


def values_of(name: str, weight: Weight) -> int:
    """Numbers that a tensor holds: MXFP4 has two in a byte, and scales of their own."""
    if weight.kind == "U8" and name.endswith("_blocks"):
        return 2 * weight.elements
    return 0 if weight.kind == "U8" and name.endswith("_scales") else weight.elements


def in_mxfp4(weights: Mapping[str, Weight]) -> tuple[int, int]:
    """(numbers, bytes with their scales) of experts in MXFP4."""
    found = {name: weight for name, weight in weights.items() if values_of(name, weight) != weight.elements}
    return sum(values_of(*item) for item in found.items()), sum(weight.stored_bytes for weight in found.values())


def _modelopt(stated: Mapping[str, Any]) -> dict[str, Any]:
    inner = stated.get("quantization") or {}
    return {**inner, "quant_method": "modelopt"} if inner.get("quant_algo") else {}


def _block(given: Any, where: str) -> tuple[int, int]:
    if given is None:
        return 128, 128
    if isinstance(given, list) and len(given) == 2 and all(isinstance(size, int) and size > 0 for size in given):
        return given[0], given[1]
    raise ConfigError(f"{where}: weight_block_size: given {given!r}, allowed: two positive numbers")


def _two(weight: Weight, part: str) -> tuple[int, int]:
    _expect(len(weight.shape) == 2, f"{part} has shape {weight.shape}, expected two dimensions")
    return weight.shape[0], weight.shape[1]


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ValueError(otherwise)


def _refuse(where: str, method: str, condition: bool, what: str) -> None:
    if condition:
        raise ConfigError(f"{where}: quantized by {method} ({what}), which is not served; served: {SERVED}")
