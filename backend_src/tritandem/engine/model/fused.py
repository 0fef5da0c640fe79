"""A decoder of the Llama kind run with few, large kernels: merged projections, fused norms, rotary and gate.

Owns the fast twin of `packed.PackedForward` for models whose modules it recognises one by one; anything else is
refused with the reason and runs on transformers' own code. Sees no weights: the products of `linear/` own them, and
leave the model usable by its own code. Fixed shapes, no synchronisation.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers import PreTrainedModel

from ..attention.interface import AttentionBatch, FusedAttention, RotaryQKV
from .experts.registry import has_products
from .linear.interface import How, Norm, NormedLinear, ResidualLinear, Unfusable
from .linear.registry import normed_linear, residual_linear
from .packed import KvCache, LayerShape


class _FeedForward(Protocol):
    def __call__(self, residual: torch.Tensor, delta: torch.Tensor | None, how: How) -> torch.Tensor | None:
        """residual [T, inner] += delta, in place; what comes to it, or None where that has been added already."""


@dataclass(frozen=True, slots=True)
class _GatedMlp:
    gate_up: NormedLinear
    down: ResidualLinear

    def __call__(self, residual: torch.Tensor, delta: torch.Tensor | None, how: How) -> torch.Tensor | None:
        return self.down(self.gate_up(residual, delta, how), residual, how)


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: NormedLinear  # [.., (heads + 2 * kv_heads) * dim]
    out: ResidualLinear
    feed_forward: _FeedForward
    rotary: RotaryQKV
    scaling: float
    window: int | None
    sink_logits: torch.Tensor | None  # [heads]


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The decode part of a pass: `table_rows` int64 [S] name each row's line of `batch.block_tables`."""

    table_rows: torch.Tensor
    batch: AttentionBatch


class FusedDecoder:
    """Logits of packed tokens over one KV cache, on CUDA."""

    def __init__(
        self,
        model: PreTrainedModel,
        shapes: list[LayerShape],
        cache: KvCache,
        attention: FusedAttention,
        max_positions: int,
        may_overlap: bool = True,
    ) -> None:
        """`may_overlap`: the device has programmatic dependent launch. Raises Unfusable."""
        self.cache, self._attention, self._may_overlap = cache, attention, may_overlap
        body: Any = getattr(model, "model", None)
        _expect(_children(model) == {"model", "lm_head"}, "the model is not a body with a head")
        _expect(_children(body) == {"embed_tokens", "layers", "norm", "rotary_emb"}, "its body has other parts")
        _expect(type(body.embed_tokens) is nn.Embedding, "its embedding is scaled or special")
        _expect(getattr(model.config, "final_logit_softcapping", None) is None, "its logits are capped")
        for scale in ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"):
            _expect(getattr(model.config, scale, None) in (None, 1.0), f"it uses {scale}")
        self._embedding = body.embed_tokens.weight
        self._head = normed_linear([model.lm_head], _norm(body.norm), shared=True)
        cos, sin = _rotary_tables(body.rotary_emb, shapes[0].head_dim, max_positions, self._embedding)
        self._layers = [self._merge(layer, shape, cos, sin) for layer, shape in zip(body.layers, shapes, strict=True)]

    def products(self) -> Iterator[object]:
        for layer in self._layers:
            yield from (layer.qkv, layer.out)
            if isinstance(layer.feed_forward, _GatedMlp):
                yield from (layer.feed_forward.gate_up, layer.feed_forward.down)
        yield self._head

    def decode(self, ids: torch.Tensor, rows: DecodeRows, rounds: bool = True) -> torch.Tensor:
        """One token a row: `ids` int64 [S]. Stores the new K and V; logits [S, V] in the model's dtype. `rounds`: of
        `How`."""
        residual = F.embedding(ids, self._embedding)
        how = How(fuse=True, overlap=rounds and self._overlaps(len(ids)), rounds=rounds)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(residual, delta, how)
            context = self._attend_rows(index, layer, qkv, rows, how)
            delta = layer.out(context.view(len(ids), -1), residual, how)
            delta = layer.feed_forward(residual, delta, how)
        return self._head(residual, delta, how)

    def prefill(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        batch: AttentionBatch,
        decode: DecodeRows | None = None,
        rounds: bool = True,
    ) -> torch.Tensor:
        """Packed chunks, with `decode` behind its S rows of one token: one pass over the weights for both.

        `ids` int64 [S + T]; `positions` int64 [T] and `batch` are those of the chunks alone. Stores K and V; logits
        [R, V] after the packed tokens `logit_rows` int64 [R], counted from the first decode row. `rounds`: of `How`.
        """
        how = How(rounds=rounds)
        count = decode.table_rows.shape[0] if decode is not None else 0
        residual = F.embedding(ids, self._embedding)
        delta: torch.Tensor | None = None
        for index, layer in enumerate(self._layers):
            last = index + 1 == len(self._layers)
            qkv = layer.qkv(residual, delta, how)
            context = qkv.new_empty((len(ids), layer.out.inner))
            if decode is not None:
                self._attend_rows(index, layer, qkv[:count], decode, how, context[:count])
            keys, values = self.cache.keys[index], self.cache.values[index]
            query = self._attention.rotate_store(qkv[count:], layer.rotary, keys, values, positions, batch.slot_mapping)
            if last and logit_rows.shape[0] == 0:  # no chunk was its prompt's last: K and V were all it was for
                return residual.new_empty((0, self._head.columns))
            out = context[count:].view(query.shape)
            self._attention.attend(
                query, keys, values, batch, layer.scaling, layer.window, None, layer.sink_logits, out
            )
            if last:  # behind its attention, only the rows whose logits are wanted matter
                context, residual = context[logit_rows], residual[logit_rows]
            delta = layer.out(context, residual, how)
            delta = layer.feed_forward(residual, delta, how)
        return self._head(residual, delta, How(fuse=True))

    def _attend_rows(
        self,
        index: int,
        layer: _Layer,
        qkv: torch.Tensor,
        rows: DecodeRows,
        how: How,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = self.cache.keys[index], self.cache.values[index]
        return self._attention.decode_fused(
            qkv,
            layer.rotary,
            keys,
            values,
            rows.batch,
            rows.table_rows,
            layer.scaling,
            layer.window,
            layer.sink_logits,
            how.overlap,
            out,
        )

    def _overlaps(self, rows: int) -> bool:
        """Overlapped launches save a third of a step where a layer's products run in our kernels; between library
        kernels, which do not take part, they cost five percent (batch 32 of a 135M model)."""
        return self._may_overlap and self._layers[0].qkv.overlaps(rows)

    def _merge(self, layer: Any, shape: LayerShape, cos: torch.Tensor, sin: torch.Tensor) -> _Layer:
        _expect(
            _children(layer) == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"},
            "its layers have other parts",
        )
        attn, mlp = layer.self_attn, layer.mlp
        projections = {"q_proj", "k_proj", "v_proj", "o_proj"}
        norms = _children(attn) - projections
        _expect(
            _children(attn) >= projections and norms in (set(), {"q_norm", "k_norm"}), "its attention has other parts"
        )
        input_norm, post_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        query_norm = key_norm = None
        if norms:
            query_norm, key_norm = _norm(attn.q_norm), _norm(attn.k_norm)
            same = query_norm.eps == key_norm.eps and query_norm.weight.shape == (shape.head_dim,)
            _expect(same, "its head norms are special")
        return _Layer(
            qkv=normed_linear([attn.q_proj, attn.k_proj, attn.v_proj], input_norm),
            out=residual_linear(attn.o_proj),
            feed_forward=_routed(mlp, post_norm) if has_products(mlp) else _gated_mlp(mlp, post_norm),
            rotary=RotaryQKV(
                cos,
                sin,
                query_norm.weight if query_norm is not None else None,
                key_norm.weight if key_norm is not None else None,
                query_norm.eps if query_norm is not None else 0.0,
            ),
            scaling=float(attn.scaling),
            window=shape.sliding_window,
            sink_logits=getattr(attn, "sinks", None),
        )


def _routed(mlp: nn.Module, norm: Norm) -> _FeedForward:
    from .experts.block import RoutedExperts  # needs the Triton language, which a CPU's torch comes without

    return RoutedExperts(mlp, norm)


def _gated_mlp(mlp: Any, norm: Norm) -> _GatedMlp:
    _expect(_children(mlp) == {"gate_proj", "up_proj", "down_proj", "act_fn"}, "its MLP has other parts")
    _expect(isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation", "its gate is not SiLU")
    down = residual_linear(mlp.down_proj)
    return _GatedMlp(normed_linear([mlp.gate_proj, mlp.up_proj], norm, gated=True, feeds=down), down)


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Unfusable(otherwise)


def _children(module: nn.Module | None) -> set[str]:
    return {name for name, _ in module.named_children()} if module is not None else set()


def _norm(module: nn.Module) -> Norm:
    name = type(module).__name__
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    plain = name.endswith("RMSNorm") and not name.startswith("Gemma")
    if not (plain and isinstance(weight, torch.Tensor) and isinstance(eps, float)):
        raise Unfusable(f"{name} is not a plain RMS norm")
    return Norm(weight, eps)


def _rotary_tables(
    module: nn.Module, dim: int, max_positions: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [max_positions, dim], as the model's own module gives them. Raises Unfusable."""
    _expect("layer_type" not in inspect.signature(module.forward).parameters, "its rotary embedding differs by layer")
    positions = torch.arange(max_positions, device=like.device)[None]
    cos, sin = module(torch.empty((), dtype=torch.float32, device=like.device), positions)
    cos, sin = cos[0].float(), sin[0].float()
    if 2 * cos.shape[1] == dim and not torch.equal(*cos.chunk(2, dim=1)):  # one angle for both halves of a head
        cos, sin = torch.cat((cos, cos), dim=1), torch.cat((sin, sin), dim=1)
    _expect(cos.shape == (max_positions, dim), "its rotary embedding covers part of a head")
    return cos.contiguous(), sin.contiguous()
