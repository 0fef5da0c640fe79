"""Quantized weights out of a folder's safetensors files, one at a time: nothing is read before it is asked for, so that
what is in memory is what was asked for and the layer at hand. Whole weights stay mapped from the file, as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ....contracts.errors import ConfigError
from ....model_facts.folder import read_folder
from ....model_facts.quantization import (
    Quantization,
    StoredLayer,
    cache_scales,
    quantization_of,
    read_quantization,
    stored_layers,
)
from ....model_facts.weight_files import Weight, read_weights, weight_files
from .layouts import unpack_layer
from .weight import QuantizedWeight


class QuantizedFiles:
    """The weights of one folder: `layers` that are quantized, and names of those that are `plain`."""

    def __init__(self, folder: Path, quantization: Quantization, weights: dict[str, Weight]) -> None:
        """Raises ConfigError for a layer that is stored in a way that is not served."""
        self.folder, self.quantization = folder, quantization
        self.layers, self.plain = stored_layers(weights, quantization, str(folder))
        self._weights = weights
        self._held: dict[str, Any] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every weight, by the name that the model knows it by."""
        plain = {name: self._weights[name].shape for name in self.plain}
        return plain | {f"{layer.name}.weight": layer.shape for layer in self.layers.values()}

    def stored_bytes(self) -> int:
        """Of the quantized layers, scales included."""
        return sum(self._weights[name].stored_bytes for layer in self.layers.values() for name in layer.parts.values())

    def cache_scales(self) -> dict[str, tuple[float, float]]:
        """Calibrated scales of cached keys and values, by the name of an attention module; of heads the largest.

        Raises ConfigError."""
        found = {}
        for name, parts in cache_scales(self._weights).items():
            if set(parts) != {"k", "v"}:
                raise ConfigError(f"{self.folder}: {name} has a scale of {''.join(parts)} alone, expected of k and v")
            key, value = (float(self._file_of(parts[kind]).get_tensor(parts[kind]).float().max()) for kind in "kv")
            if not (0.0 < key < float("inf") and 0.0 < value < float("inf")):
                raise ConfigError(f"{self.folder}: {name}: scales of k and v are {key} and {value}, expected above 0")
            found[name] = key, value
        return found

    def state(self, dtype: torch.dtype, packed: Collection[str]) -> dict[str, Any]:
        """What `from_pretrained` takes as a state dict: each value is read when it is indexed, in `dtype` if it was
        quantized. The layers `packed` get a stand-in without memory, for a module that is put in their place."""
        state: dict[str, Any] = {name: self._file_of(name).get_slice(name) for name in self.plain}
        for layer in self.layers.values():
            if layer.name in packed:
                state[f"{layer.name}.weight"] = torch.zeros((), dtype=dtype).expand(layer.shape)
            else:
                state[f"{layer.name}.weight"] = Unread(partial(self._dense, layer, dtype))
        return state

    def read(self, layer: StoredLayer) -> QuantizedWeight:
        """Raises ConfigError."""
        parts = {part: self._file_of(name).get_tensor(name) for part, name in layer.parts.items()}
        try:
            return unpack_layer(layer, parts, self.quantization)
        except ValueError as error:
            raise ConfigError(f"{self.folder}: {layer.name}: {error}") from error

    def _dense(self, layer: StoredLayer, dtype: torch.dtype) -> torch.Tensor:
        return self.read(layer).dense(dtype)

    def _file_of(self, name: str) -> Any:
        if not self._held:
            for file in weight_files(self.folder):
                opened: Any = safe_open(self.folder / file, framework="pt", device="cpu")
                self._held |= dict.fromkeys(opened.offset_keys(), opened)
        return self._held[name]


class Unread:
    """A tensor that is made when it is indexed, by whoever loads it."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make

    def __getitem__(self, _: Any) -> torch.Tensor:
        return self._make()


def quantized_files(path: Path, stated: Any) -> QuantizedFiles | None:
    """None: a model that is not quantized. `stated`: the `quantization_config` of a hub id, which has no folder here.

    Raises ConfigError for a kind that is not served, and for files of another format than safetensors.
    """
    if not path.is_dir():
        if stated:
            quantization_of(stated, str(path))
            raise ConfigError(f"{path}: a quantized model is served from a folder that holds its files")
        return None
    quantization = read_quantization(read_folder(path))
    if quantization is None:
        return None
    weights = read_weights(path)
    if weights is None:
        raise ConfigError(f"{path}: a quantized model is read from safetensors files; there are none")
    return QuantizedFiles(path, quantization, weights)
