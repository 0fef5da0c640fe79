"""Can this model be served? Found out by running it, once, at load.

Owns the verdict and the per-layer attention shapes. A short pass through our attention and our layers with a state
must reach every layer exactly once, with nothing but standard causal attention asked for, and give the logits that the
model's own eager attention gives. What a short pass cannot show, windows, is read off the functions from which
transformers makes each layer's mask. Knows nothing about requests; runs in the loading thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ...contracts.errors import ConfigError
from ...model_facts.folder import context_tokens
from ..attention.dense import DenseAttention
from ..attention.interface import AttentionBatch
from .packed import ATTENTION_NAME, KvCache, LayerShape, PackedForward, packed_attention, run_model
from .states.cache import StateCache
from .states.interface import DeltaLayer
from .states.layers import FAMILIES, LAYER_TYPE, find_layers, take_over

PROBE_TOKENS = 24
PROBE_NAME = "tritandem_probe"
LONGEST_CONTEXT = 1 << 20  # of a model that states none
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_MASK_FUNCTION = "tritandem_mask_function"  # attribute of the probe's masks
_HARMLESS = {"position_ids", "cache_position", "position_embeddings", "s_aux"}
_MODEL_ERRORS = (TypeError, ValueError, RuntimeError, KeyError, IndexError, AttributeError, AssertionError)
_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}


class UnsupportedModel(ConfigError):
    """The architecture cannot be served; the message says why."""


def check_config(config: PreTrainedConfig) -> None:
    """Refuse by configuration what must not even be built as a decoder. Raises UnsupportedModel."""
    name = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{name}: encoder-decoder models cannot be served, only decoders")
    known = _LAYER_TYPES | {LAYER_TYPE} if name in FAMILIES else _LAYER_TYPES
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in known:
            raise UnsupportedModel(
                f"{name}: has {layer_type!r} layers; only full and sliding attention is served, "
                "and the gated delta rule of known families"
            )
    if getattr(config, "is_causal", True) is False or getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModel(f"{name}: its attention is not causal")


class _Recorder:
    """The attention of the probe: notes shapes and answers with dense causal attention. Layers with a state run as
    transformers has them."""

    def __init__(
        self, num_tokens: int, context_tokens: int, states: dict[int, DeltaLayer], device: torch.device
    ) -> None:
        self.layers: dict[int, LayerShape] = {}
        self._states = states
        self.calls: list[int] = []
        self.batch = _one_row_batch(0, num_tokens, device)
        self._context_tokens = context_tokens
        self._windows: dict[MaskFunction, int | None] = {}

    def window(self, mask: torch.Tensor | None, passed: int | None) -> int | None:
        """Of a layer that gets `mask` and passes `passed` on: the mask is what the model's own attention obeys."""
        if mask is None:
            return passed
        function = getattr(mask, _MASK_FUNCTION, None)
        if function is None:
            raise UnsupportedModel("it adds a mask or bias of its own to the attention scores")
        if function not in self._windows:
            self._windows[function] = window_of(function, self._context_tokens, mask.device)
        return self._windows[function]

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
        if key.shape != value.shape or query.shape[2] != key.shape[2]:
            raise UnsupportedModel("its keys and values differ in shape (latent attention)")
        self.calls.append(layer)
        self.layers[layer] = LayerShape(query.shape[1], key.shape[1], key.shape[2], sliding_window, layer)
        key_cache = key.new_zeros((2, self.batch.max_context_tokens, *key.shape[1:]))
        value_cache = torch.zeros_like(key_cache)
        backend = DenseAttention()
        backend.store(key, value, key_cache, value_cache, self.batch)
        return backend.attend(query, key_cache, value_cache, self.batch, scaling, sliding_window, softcap, sink_logits)

    def mix(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        self.calls.append(layer)
        out: torch.Tensor = self._states[layer].module(hidden)
        return out


def stated_context(config: PreTrainedConfig) -> int:
    """The context limit, in tokens, that a model's configuration states."""
    return context_tokens(config.to_dict()) or LONGEST_CONTEXT


def window_of(mask_function: MaskFunction, context_tokens: int, device: torch.device | str) -> int | None:
    """How many positions, its own included, a query sees; None: all before it. Raises UnsupportedModel for any other
    pattern within the context.

    A mask function takes positions, so it is asked about the whole context without a pass of that length. What the
    last query sees is the only window that can be meant. That it is one is checked at both ends of the context, in the
    middle, and around where queries first lose sight of something: there, chunks begin instead.
    """
    keys = torch.arange(context_tokens, device=device)
    zero = keys[:1].view(1, 1, 1, 1)

    def seen(query: int) -> torch.Tensor:
        visible = mask_function(zero, zero, zero + query, keys.view(1, 1, 1, -1))
        return visible.expand(1, 1, 1, context_tokens).flatten()

    window = int(seen(context_tokens - 1).sum())
    middle = context_tokens // 2
    for query in (0, 1, window - 1, window, window + 1, 2 * window, middle, context_tokens - 2, context_tokens - 1):
        if 0 <= query < context_tokens:
            right = (keys <= query) & (keys > query - window)
            if not torch.equal(seen(query), right):
                raise UnsupportedModel("its attention mask is neither causal nor a sliding window")
    return None if window == context_tokens else window


def _mark(
    batch_size: int, q_length: int, kv_length: int, mask_function: MaskFunction, device: torch.device, **_: Any
) -> torch.Tensor:
    """transformers asks for a mask: one that masks nothing and carries the function that would have made it."""
    mask = torch.ones((batch_size, 1, q_length, kv_length), dtype=torch.bool, device=device)
    setattr(mask, _MASK_FUNCTION, mask_function)
    return mask


def _one_row_batch(start: int, end: int, device: torch.device) -> AttentionBatch:
    """Positions [start, end) of one sequence that lies in block 1, which holds them all."""
    block_tokens = PROBE_TOKENS
    return AttentionBatch(
        slot_mapping=torch.arange(block_tokens + start, block_tokens + end, device=device),
        block_tables=torch.ones((1, 1), dtype=torch.int32, device=device),
        context_lens=torch.tensor([end], dtype=torch.int32, device=device),
        query_starts=torch.tensor([0, end - start], dtype=torch.int32, device=device),
        max_query_tokens=end - start,
        max_context_tokens=end,
        decode=False,
        slots=torch.zeros(1, dtype=torch.int64, device=device),
    )


def _strict_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """`packed_attention` that refuses what it would otherwise ignore."""
    if not getattr(module, "is_causal", True):
        raise UnsupportedModel("its attention is not causal")
    if getattr(module, "layer_idx", None) is None:
        raise UnsupportedModel("its attention layers carry no index")
    for name, given in kwargs.items():
        if name not in _HARMLESS and isinstance(given, torch.Tensor):
            raise UnsupportedModel(f"it passes a tensor {name!r} to attention, which standard attention lacks")
    sink_logits = kwargs.get("s_aux")
    if sink_logits is not None and sink_logits.shape != (query.shape[1],):
        raise UnsupportedModel("its attention sinks are not one a head")
    recorder = kwargs.get("tritandem_sink")
    if isinstance(recorder, _Recorder):
        kwargs["sliding_window"] = recorder.window(attention_mask, kwargs.get("sliding_window"))
    return packed_attention(module, query, key, value, None, **kwargs)


ALL_ATTENTION_FUNCTIONS.register(PROBE_NAME, _strict_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(PROBE_NAME, _mark)


@torch.no_grad()
def inspect_model(model: PreTrainedModel) -> list[LayerShape]:
    """The attention shape of every layer. Raises UnsupportedModel with the reason."""
    config = model.config.get_text_config()
    name, device = config.model_type, model.device
    ids = torch.arange(PROBE_TOKENS, device=device) * 7919 % config.vocab_size
    positions = torch.arange(PROBE_TOKENS, device=device)
    try:
        states = find_layers(model)
    except ValueError as error:
        raise UnsupportedModel(f"{name}: {error}") from error
    for layer in states.values():
        take_over(layer)
    recorder = _Recorder(PROBE_TOKENS, stated_context(config), states, device)
    try:
        model.set_attn_implementation(PROBE_NAME)
        run_model(model, ids, positions, positions, recorder)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{name}: {error}") from None
    except _MODEL_ERRORS as error:
        raise UnsupportedModel(f"{name}: its forward pass does not take packed tokens: {error}") from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    _check_calls(name, config, recorder)
    layers = [recorder.layers[index] for index in sorted(recorder.layers)]
    if not layers:
        raise UnsupportedModel(f"{name}: no layer of it has attention")
    _check_logits(name, model, layers, ids, positions)
    return layers


def _check_calls(name: str, config: PreTrainedConfig, recorder: _Recorder) -> None:
    expected = config.num_hidden_layers
    if recorder.calls != list(range(expected)):
        called = len(set(recorder.calls))
        raise UnsupportedModel(
            f"{name}: {called} of {expected} layers use standard attention once and in order; "
            "state-space, linear or shared attention cannot be served"
        )


def _check_logits(
    name: str, model: PreTrainedModel, layers: list[LayerShape], ids: torch.Tensor, positions: torch.Tensor
) -> None:
    """Two chunks and a single token through a paged cache must agree with the model's own attention over the whole."""
    model.set_attn_implementation("eager")
    try:
        truth = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0].float()
    except _MODEL_ERRORS as error:
        raise UnsupportedModel(f"{name}: its own attention does not run: {error}") from error
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
    forward = PackedForward(
        model,
        KvCache.allocate(layers, 2, PROBE_TOKENS, model.dtype, model.device),
        DenseAttention(),
        StateCache.allocate(model, slots=1),
    )
    cut, last = PROBE_TOKENS * 2 // 3, PROBE_TOKENS - 1
    ours = torch.cat(
        [
            forward.logits(ids[a:b], positions[a:b], positions[: b - a], _one_row_batch(a, b, model.device))
            for a, b in ((0, cut), (cut, last), (last, PROBE_TOKENS))
        ]
    )
    difference = float((ours - truth).norm() / truth.norm().clamp(min=1e-6))
    # Deep models with random weights differ by several percent in bfloat16; wrong attention by more than half.
    limit = 1e-3 if model.dtype == torch.float32 else 0.15
    if not difference <= limit:
        raise UnsupportedModel(
            f"{name}: logits through paged attention differ from the model's own by {difference:.1e} (relative), "
            f"allowed: {limit:.0e}"
        )
