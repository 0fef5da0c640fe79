"""A transformers decoder run over packed tokens with our attention and our KV cache.

Owns the KV tensors and the call into the model; the attention goes through transformers' attention
interface, layers with a state through their own forward, which `states/` takes over. Fixed shapes, no host
synchronisation: a CUDA graph may capture `PackedForward.logits`. Knows nothing about sampling or requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..attention.interface import AttentionBackend, AttentionBatch
from .states.cache import StateCache

ATTENTION_NAME = "tritandem"


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The attention of one layer, as `support.py` found it."""

    heads: int
    kv_heads: int
    head_dim: int
    sliding_window: int | None
    number: int  # in the model, where layers without attention may lie between


@dataclass(frozen=True, slots=True)
class KvCache:
    """Per layer [num_blocks, block_tokens, kv_heads, head_dim]; block 0 is the null block."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    windows: list[int | None]  # how far back each layer's queries see
    places: dict[int, int]  # in these lists, by the layer's number in the model

    @classmethod
    def allocate(
        cls,
        layers: Sequence[LayerShape],
        num_blocks: int,
        block_tokens: int,
        kv_type: torch.dtype,
        device: torch.device | str,
    ) -> KvCache:
        """Zeroed, so that masked positions of a block never hold a NaN. Raises torch.OutOfMemoryError."""

        def zeros(layer: LayerShape) -> torch.Tensor:
            shape = (num_blocks, block_tokens, layer.kv_heads, layer.head_dim)
            return torch.zeros(shape, dtype=kv_type, device=device)

        keys, values = ([zeros(layer) for layer in layers] for _ in range(2))
        places = {layer.number: place for place, layer in enumerate(layers)}
        return cls(keys, values, [layer.sliding_window for layer in layers], places)

    def copy_blocks(self, copies: torch.Tensor) -> None:
        """What is in the first block of each pair (int64 [C, 2]) is in the second, too. No second one is a first."""
        source, target = copies.unbind(dim=1)
        for layer in (*self.keys, *self.values):
            plain = layer.view(torch.uint8)  # not every type of a cache can be picked from by index
            plain.index_copy_(0, target, plain[source])


def kv_bytes_per_token(layers: Sequence[LayerShape], kv_type: torch.dtype) -> int:
    return sum(2 * layer.kv_heads * layer.head_dim for layer in layers) * kv_type.itemsize


def window_tokens(layers: Sequence[LayerShape]) -> int | None:
    """The longest of all layers' windows; None where a layer sees everything."""
    windows = [layer.sliding_window for layer in layers]
    known = [window for window in windows if window is not None]
    return max(known) if known and len(known) == len(windows) else None


class AttentionSink(Protocol):
    """Receives every attention call of one forward pass, and the layers with a state."""

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sink_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        """query [T, heads, D], key and value [T, kv_heads, D], sink_logits [heads] -> [T, heads, D]."""

    def mix(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """What a layer with a state makes of [1, T, hidden], in the same shape."""


@dataclass(frozen=True, slots=True)
class PagedContext:
    """The attention calls of a served pass: store the new K and V, attend over the cache.

    The window is the one found at load: a layer may leave it to its mask, and no mask is made here.
    """

    backend: AttentionBackend
    cache: KvCache
    states: StateCache | None
    batch: AttentionBatch

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sink_logits: torch.Tensor | None,
    ) -> torch.Tensor:
        place = self.cache.places[layer]
        key_cache, value_cache = self.cache.keys[place], self.cache.values[place]
        self.backend.store(key, value, key_cache, value_cache, self.batch)
        window = self.cache.windows[place]
        return self.backend.attend(query, key_cache, value_cache, self.batch, scaling, window, softcap, sink_logits)

    def mix(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        assert self.states is not None
        return self.states.mix(layer, hidden, self.batch)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    tritandem_sink: AttentionSink | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for each layer: query [1, heads, T, D], key and value [1, kv_heads, T, D].

    Other keyword arguments are judged once, at load (`support.py`), and not again in every step.
    """
    if tritandem_sink is None:
        raise RuntimeError("its layers do not pass keyword arguments on to attention")
    out = tritandem_sink(
        cast(int, module.layer_idx),
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window,
        softcap,
        s_aux,
    )
    return out.unsqueeze(0), None


# No mask function is registered under this name: transformers then builds no mask at all.
ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, packed_attention)


def run_model(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, sink: AttentionSink
) -> torch.Tensor:
    """Logits (float32 [R, V]) after the packed tokens `rows` (int64 [R]) of ids and positions (int64 [T])."""
    output = model(
        input_ids=ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=rows,
        tritandem_sink=sink,
    )
    return cast(torch.Tensor, output.logits[0].float())


class PackedForward:
    """One loaded model over one KV cache and, where it has layers with a state, the states of each slot."""

    def __init__(
        self, model: PreTrainedModel, cache: KvCache, backend: AttentionBackend, states: StateCache | None = None
    ) -> None:
        self.model, self.cache, self.backend, self.states = model, cache, backend, states

    @torch.no_grad()
    def logits(
        self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Store K and V of T packed tokens and return float32 [R, V] logits after the tokens `rows`."""
        context = PagedContext(self.backend, self.cache, self.states, batch)
        return run_model(self.model, ids, positions, rows, context)
