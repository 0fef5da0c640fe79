"""A decoder of the Llama kind run with few, large kernels: merged projections, fused norms, rotary and gate.

Owns the fast twin of `forward.PackedForward` for models whose modules it recognises one by one; anything
else is refused with the reason and runs on transformers' own code. Weights are merged and norm weights folded
in place (the model's parameters become views), so both twins stay usable. Fixed shapes, no synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from transformers import PreTrainedModel

from ..attention.interface import AttentionBatch
from ..attention.paged import PagedAttention, RotaryQKV, next_power_of_two
from .linear.few_rows import choose_linear_tiles, few_row_linear
from .packed import KvCache, LayerShape
from .pointwise_kernels import add_norm_kernel, rotate_store_kernel, silu_mul_kernel


class Unfusable(Exception):
    """The model is not of the shape that is fused; the message says what differs."""


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: torch.Tensor  # [(heads + 2 * kv_heads) * dim, hidden]
    qkv_bias: torch.Tensor | None
    out: torch.Tensor  # [hidden, heads * dim]
    post_norm: torch.Tensor
    gate_up: torch.Tensor  # [2 * intermediate, hidden], gate rows first
    down: torch.Tensor  # [hidden, intermediate]
    rotary: RotaryQKV
    scaling: float
    window: int | None


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
        attention: PagedAttention,
        max_positions: int,
        may_overlap: bool = True,
    ) -> None:
        """`may_overlap`: the device has programmatic dependent launch. Raises Unfusable."""
        self.cache, self._attention, self._may_overlap = cache, attention, may_overlap
        self._overlap = False
        body: Any = getattr(model, "model", None)
        _expect(_children(model) == {"model", "lm_head"}, "the model is not a body with a head")
        _expect(_children(body) == {"embed_tokens", "layers", "norm", "rotary_emb"}, "its body has other parts")
        _expect(type(body.embed_tokens) is nn.Embedding, "its embedding is scaled or special")
        _expect(getattr(model.config, "final_logit_softcapping", None) is None, "its logits are capped")
        for scale in ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier"):
            _expect(getattr(model.config, scale, None) in (None, 1.0), f"it uses {scale}")
        self._embedding = body.embed_tokens.weight
        self._head, head_bias = _linear(model.lm_head)
        _expect(head_bias is None, "its head has a bias")
        self._final_norm, self._eps = _norm(body.norm)
        cos, sin = _rotary_tables(body.rotary_emb, shapes[0].head_dim, max_positions, self._embedding)
        self._layers = [self._merge(layer, shape, cos, sin) for layer, shape in zip(body.layers, shapes, strict=True)]

    def decode(self, ids: torch.Tensor, rows: DecodeRows) -> torch.Tensor:
        """One token a row: `ids` int64 [S]. Stores the new K and V; logits [S, V] in the model's dtype."""
        residual = F.embedding(ids, self._embedding)
        delta: torch.Tensor | None = None
        self._overlap = self._may_overlap and self._is_ours(residual)
        for index, layer in enumerate(self._layers):
            qkv = self._normed_linear(residual, delta, layer.input_norm, layer.qkv, layer.qkv_bias)
            context = self._attend_rows(index, layer, qkv, rows)
            delta = self._residual_linear(context.view(len(ids), -1), layer.out, residual)
            hidden = self._normed_linear(residual, delta, layer.post_norm, layer.gate_up, None, gated=True)
            delta = self._residual_linear(hidden, layer.down, residual)
        return self._logits(residual, delta)

    def prefill(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        logit_rows: torch.Tensor,
        batch: AttentionBatch,
        decode: DecodeRows | None = None,
    ) -> torch.Tensor:
        """Packed chunks, with `decode` behind its S rows of one token: one pass over the weights for both.

        `ids` int64 [S + T]; `positions` int64 [T] and `batch` are those of the chunks alone. Stores K and V; logits
        [R, V] after the packed tokens `logit_rows` int64 [R], counted from the first decode row.
        """
        self._overlap = False
        count = decode.table_rows.shape[0] if decode is not None else 0
        residual = F.embedding(ids, self._embedding)
        normed = self._add_norm(None, residual, self._layers[0].input_norm)
        for index, layer in enumerate(self._layers):
            last = index + 1 == len(self._layers)
            qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
            context = qkv.new_empty((len(ids), layer.out.shape[1]))
            if decode is not None:
                self._attend_rows(index, layer, qkv[:count], decode, context[:count])
            query = self._rotate_store(index, layer, qkv[count:], positions, batch)
            if last and logit_rows.shape[0] == 0:  # no chunk was its prompt's last: K and V were all it was for
                return residual.new_empty((0, self._head.shape[0]))
            self._attention.attend(
                query,
                self.cache.keys[index],
                self.cache.values[index],
                batch,
                layer.scaling,
                layer.window,
                out=context[count:].view(query.shape),
            )
            if last:  # behind its attention, only the rows whose logits are wanted matter
                context, residual = context[logit_rows], residual[logit_rows]
            delta = F.linear(context, layer.out)
            normed = self._add_norm(delta, residual, layer.post_norm)
            delta = F.linear(self._silu_mul(F.linear(normed, layer.gate_up)), layer.down)
            if not last:
                normed = self._add_norm(delta, residual, self._layers[index + 1].input_norm)
        return self._logits(residual, delta)

    def _attend_rows(
        self, index: int, layer: _Layer, qkv: torch.Tensor, rows: DecodeRows, out: torch.Tensor | None = None
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
            self._overlap,
            out,
        )

    def _is_ours(self, residual: torch.Tensor) -> bool:
        """Whether a layer's products run in our kernels. Overlapped launches save a third of a step then;
        between library kernels, which do not take part, they cost five percent (batch 32 of a 135M model)."""
        columns, inner = self._layers[0].qkv.shape
        return choose_linear_tiles(residual.shape[0], columns, inner, residual.dtype) is not None

    # A product either adds its result to the residual itself (few rows) or leaves that to the next norm.

    def _normed_linear(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        norm: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gated: bool = False,
    ) -> torch.Tensor:
        """residual += delta, then the product of its norm; with `gated` silu(gate) * up of that."""
        rows, (columns, inner) = residual.shape[0], weight.shape
        tiles = choose_linear_tiles(rows, columns, inner, residual.dtype, gated) if delta is None else None
        if tiles is not None:
            return few_row_linear(
                residual, weight, tiles, norm_eps=self._eps, bias=bias, gated=gated, overlap=self._overlap
            )
        product = F.linear(self._add_norm(delta, residual, norm), weight, bias)
        return self._silu_mul(product) if gated else product

    def _residual_linear(self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor) -> torch.Tensor | None:
        """The product, or None when it has been added to `residual` already."""
        tiles = choose_linear_tiles(x.shape[0], weight.shape[0], weight.shape[1], x.dtype)
        if tiles is None:
            return F.linear(x, weight)
        few_row_linear(x, weight, tiles, residual=residual, overlap=self._overlap)
        return None

    def _add_norm(self, delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """residual += delta, in place; returns its RMS norm."""
        out = torch.empty_like(residual)
        width = residual.shape[1]
        add_norm_kernel[(residual.shape[0],)](
            residual if delta is None else delta,
            residual,
            weight,
            out,
            self._eps,
            K=width,
            BLOCK_K=next_power_of_two(width),
            HAS_ADD=delta is not None,
            OVERLAP=self._overlap,
            launch_pdl=self._overlap,
            num_warps=4 if width <= 2048 else 8,
        )
        return out

    def _silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * N] -> [T, N]."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
        block = min(1024, next_power_of_two(width))
        silu_mul_kernel[(rows, (width + block - 1) // block)](
            gate_up, out, N=width, BLOCK_N=block, OVERLAP=self._overlap, launch_pdl=self._overlap, num_warps=4
        )
        return out

    def _rotate_store(
        self, index: int, layer: _Layer, qkv: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Rotated Q [T, heads, dim], a view of `qkv`; K and V are in the cache."""
        keys, values = self.cache.keys[index], self.cache.values[index]
        kv_heads, dim = keys.shape[2:]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        rotary = layer.rotary
        rotate_store_kernel[(qkv.shape[0],)](
            qkv,
            rotary.cos,
            rotary.sin,
            positions,
            batch.slot_mapping,
            rotary.query_norm if rotary.query_norm is not None else qkv,
            rotary.key_norm if rotary.key_norm is not None else qkv,
            keys,
            values,
            rotary.norm_eps,
            H=heads,
            KVH=kv_heads,
            D=dim,
            BLOCK_H=next_power_of_two(heads + kv_heads),
            BLOCK_D=next_power_of_two(dim),
            HAS_NORM=rotary.query_norm is not None,
            num_warps=4,
        )
        return qkv[:, : heads * dim].view(-1, heads, dim)

    def _logits(self, residual: torch.Tensor, delta: torch.Tensor | None) -> torch.Tensor:
        normed = self._add_norm(delta, residual, self._final_norm)
        tiles = choose_linear_tiles(normed.shape[0], self._head.shape[0], self._head.shape[1], normed.dtype)
        if tiles is not None:
            return few_row_linear(normed, self._head, tiles, overlap=self._overlap)
        return F.linear(normed, self._head)

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
        _expect(_children(mlp) == {"gate_proj", "up_proj", "down_proj", "act_fn"}, "its MLP has other parts")
        _expect(
            isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation", "its gate is not SiLU"
        )
        input_norm, input_eps = _norm(layer.input_layernorm)
        post_norm, post_eps = _norm(layer.post_attention_layernorm)
        _expect(input_eps == post_eps == self._eps, "its norms differ in epsilon")
        query_norm = key_norm = None
        if norms:
            (query_norm, query_eps), (key_norm, key_eps) = _norm(attn.q_norm), _norm(attn.k_norm)
            _expect(query_eps == key_eps and query_norm.shape == (shape.head_dim,), "its head norms are special")
        out, out_bias = _linear(attn.o_proj)
        down, down_bias = _linear(mlp.down_proj)
        _expect(out_bias is None and down_bias is None, "its output projections have a bias")
        qkv, qkv_bias = _merged([attn.q_proj, attn.k_proj, attn.v_proj])
        gate_up, gate_bias = _merged([mlp.gate_proj, mlp.up_proj])
        _expect(gate_bias is None, "its MLP has a bias")
        _fold(input_norm, qkv)
        _fold(post_norm, gate_up)
        rotary = RotaryQKV(cos, sin, query_norm, key_norm, query_eps if norms else 0.0)
        return _Layer(
            input_norm,
            qkv,
            qkv_bias,
            out,
            post_norm,
            gate_up,
            down,
            rotary,
            float(attn.scaling),
            shape.sliding_window,
        )


def _expect(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Unfusable(otherwise)


def _children(module: nn.Module | None) -> set[str]:
    return {name for name, _ in module.named_children()} if module is not None else set()


def _linear(module: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    _expect(type(module) is nn.Linear, f"{type(module).__name__} stands where a plain linear layer was expected")
    return cast(torch.Tensor, module.weight), cast("torch.Tensor | None", module.bias)


def _norm(module: nn.Module) -> tuple[torch.Tensor, float]:
    name = type(module).__name__
    _expect(name.endswith("RMSNorm") and not name.startswith("Gemma"), f"{name} is not a plain RMS norm")
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    _expect(isinstance(weight, torch.Tensor) and isinstance(eps, float), f"{name} is not a plain RMS norm")
    return cast(torch.Tensor, weight), cast(float, eps)


def _merged(modules: list[nn.Module]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights (and biases) one under the other; the modules keep views, so no memory is held twice."""
    pairs = [_linear(module) for module in modules]
    weight = torch.cat([pair[0].data for pair in pairs])
    biases = [pair[1] for pair in pairs]
    _expect(all(b is None for b in biases) or all(b is not None for b in biases), "only some projections have a bias")
    bias = torch.cat([b.data for b in biases if b is not None]) if biases[0] is not None else None
    row = 0
    for module in modules:
        linear = cast(nn.Linear, module)
        linear.weight.data = weight[row : row + linear.out_features]
        if bias is not None and linear.bias is not None:
            linear.bias.data = bias[row : row + linear.out_features]
        row += linear.out_features
    return weight, bias


def _fold(norm: torch.Tensor, weight: torch.Tensor) -> None:
    """Move a norm's weight into the product that follows it, in place: the norm becomes a bare 1 / rms."""
    weight.copy_(weight.float() * norm.data.float())
    norm.data.fill_(1.0)


def _rotary_tables(
    module: nn.Module, dim: int, max_positions: int, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [max_positions, dim], as the model's own module gives them."""
    positions = torch.arange(max_positions, device=like.device)[None]
    cos, sin = module(torch.empty((), dtype=torch.float32, device=like.device), positions)
    _expect(cos.shape == (1, max_positions, dim), "its rotary embedding covers part of a head")
    return cos[0].float().contiguous(), sin[0].float().contiguous()
