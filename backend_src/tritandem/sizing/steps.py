"""How long decode steps and prompts take on several GPUs, from a model's shape and measured constants. Pure functions.

A layer is four products, attention, two norms, a gate and, over several ranks, two sums. Tensor parallelism divides
products, attention and the gate by the ranks; pipeline parallelism divides the layers, and is reckoned on paper only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import EngineConfig
from ..contracts.errors import ConfigError
from .gpu import Gpu

ACTIVATION_BYTES = 2
FUSED_ROWS = 16  # up to so many rows norms and gate are part of the products' kernels
CHUNK_TOKENS, PIPELINED_CHUNK_TOKENS = 8192, 2048  # of a prompt, in one pass
MEMORY_FRACTION = EngineConfig().kv_memory_fraction  # of what weights leave


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A dense decoder of the Llama kind."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int

    @classmethod
    def of(cls, stated: Mapping[str, Any], where: str) -> DecoderShape:
        """Of a config.json. Raises ConfigError naming the key."""
        if stated.get("num_experts", stated.get("num_local_experts", stated.get("n_routed_experts"))):
            raise ConfigError(f"{where}: a mixture of experts is not reckoned with, only dense decoders")

        def whole(key: str, otherwise: Any = None) -> int:
            value = stated.get(key, otherwise)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{where}: {key}: given {value!r}, allowed: a whole number above 0")
            return value

        heads, hidden = whole("num_attention_heads"), whole("hidden_size")
        return cls(
            whole("num_hidden_layers"),
            hidden,
            whole("intermediate_size"),
            heads,
            whole("num_key_value_heads", heads),
            whole("head_dim", hidden // heads),
            whole("vocab_size"),
        )

    @property
    def layer_parameters(self) -> int:
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    def kv_bytes(self, layout: Layout) -> int:
        """Of one token and layer on one rank; fewer heads than ranks are held several times."""
        return 2 * math.ceil(self.kv_heads / layout.ranks) * self.head_dim * layout.kv_value_bytes


@dataclass(frozen=True, slots=True)
class Layout:
    """One engine on `ranks` x `stages` GPUs. `weight_bytes`: of a value with its scale, 2 in bfloat16, 1 in FP8 (the
    head stays at 2). `kv_value_bytes`: of a cached key or value."""

    gpu: Gpu
    ranks: int = 1
    stages: int = 1
    weight_bytes: float = 2
    kv_value_bytes: int = 2


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds by what they go to."""

    products: float = 0.0
    attention: float = 0.0
    rowwise: float = 0.0
    sums: float = 0.0  # over ranks
    idle: float = 0.0  # no kernel runs: gaps, launches, bubbles of a pipeline

    @property
    def total(self) -> float:
        return self.products + self.attention + self.rowwise + self.sums + self.idle

    @property
    def utilisation(self) -> float:
        """The share of time in which a kernel runs."""
        return 1 - self.idle / self.total

    def __add__(self, other: Spent) -> Spent:
        return Spent(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    def times(self, factor: float) -> Spent:
        return Spent(*(getattr(self, name) * factor for name in self.__slots__))


def check_layout(shape: DecoderShape, layout: Layout) -> None:
    """Raises ConfigError where ranks or stages do not divide the model."""
    for name, count in (("attention heads", shape.heads), ("intermediate size", shape.intermediate)):
        if count % layout.ranks:
            raise ConfigError(f"--ranks: given {layout.ranks}, allowed: what divides the model's {count} {name}")
    if shape.layers % layout.stages:
        raise ConfigError(f"--stages: given {layout.stages}, allowed: what divides the model's {shape.layers} layers")


def products_s(gpu: Gpu, parameters: float, rows: int, count: int, weight_bytes: float) -> float:
    """`count` products with so many weights together over `rows` rows: bound by weights or by arithmetic."""
    flops = (gpu.fp8_flops if weight_bytes == 1 else gpu.bf16_flops).value  # what is packed tighter is unpacked
    by_weights, by_arithmetic = parameters * weight_bytes / gpu.weight_bytes_per_s.value, 2 * parameters * rows / flops
    return count * gpu.product_s.value + max(by_weights, by_arithmetic)


def sum_s(gpu: Gpu, ranks: int, num_bytes: float) -> float:
    """Over ranks: each reads 2 * (ranks - 1) / ranks of what there is."""
    if ranks == 1:
        return 0.0
    latency = gpu.reduce_s.value + gpu.reduce_s_per_doubling.value * (math.log2(ranks) - 1)
    return latency + 2 * (ranks - 1) / ranks * num_bytes / gpu.link_bytes_per_s.value


def decode_step(shape: DecoderShape, layout: Layout, rows: int, context_tokens: float) -> Spent:
    """One token for each of `rows` sequences of `context_tokens`: of every stage, one after the other."""
    gpu = layout.gpu
    attention = gpu.attention_s.value + rows * context_tokens * shape.kv_bytes(layout) / gpu.kv_bytes_per_s.value
    layer = _layer(shape, layout, rows) + Spent(attention=attention)
    hops = (layout.stages - 1) * (gpu.reduce_s.value + _residual_bytes(shape, rows) / gpu.link_bytes_per_s.value)
    return layer.times(shape.layers) + _head(shape, layout, rows) + Spent(sums=hops)


def first_token(shape: DecoderShape, layout: Layout, prompt_tokens: int) -> Spent:
    """A lone prompt, from its first launch to its first token. With stages, chunks follow each other through them."""
    gpu, ranks, stages = layout.gpu, layout.ranks, layout.stages
    size = CHUNK_TOKENS if stages == 1 else PIPELINED_CHUNK_TOKENS
    whole, last = Spent(), Spent()
    for start in range(0, prompt_tokens, size):
        tokens = min(size, prompt_tokens - start)
        pairs = tokens * start + tokens * tokens / 2
        flops = 4 * shape.heads / ranks * shape.head_dim * pairs
        attention = gpu.attention_s.value + flops / gpu.attention_flops.value
        last = (_layer(shape, layout, tokens) + Spent(attention=attention)).times(shape.layers / stages)
        whole += last
    hop = gpu.reduce_s.value + _residual_bytes(shape, min(size, prompt_tokens)) / gpu.link_bytes_per_s.value
    # While the last chunk goes through the other stages, this one has nothing to do.
    bubble = (stages - 1) * (last.total + hop)
    starts = gpu.pass_s.value + (ranks * stages - 1) * gpu.launch_s.value
    return whole + _head(shape, layout, 1) + Spent(idle=bubble + starts)


def weight_bytes_a_gpu(shape: DecoderShape, layout: Layout) -> float:
    """Of the fullest GPU: its part of the layers, and of embedding and head."""
    layers = shape.layers / layout.stages * shape.layer_parameters * layout.weight_bytes
    ends = (2 if layout.stages == 1 else 1) * shape.vocab * shape.hidden * ACTIVATION_BYTES
    return (layers + ends) / layout.ranks


def kv_tokens(shape: DecoderShape, layout: Layout) -> int:
    """That fit beside the weights, of all sequences; 0 where the weights do not."""
    left = (layout.gpu.memory_bytes.value - weight_bytes_a_gpu(shape, layout)) * MEMORY_FRACTION
    return max(0, int(left / (shape.kv_bytes(layout) * shape.layers / layout.stages)))


def _layer(shape: DecoderShape, layout: Layout, rows: int) -> Spent:
    """Without attention."""
    gpu, ranks = layout.gpu, layout.ranks
    products = products_s(gpu, shape.layer_parameters / ranks, rows, 4, layout.weight_bytes)
    sums = 2 * sum_s(gpu, ranks, _residual_bytes(shape, rows))
    if rows <= FUSED_ROWS:
        return Spent(products, sums=sums)
    # A norm reads and writes the residual, reads what comes to it and writes its result; a gate makes one of two.
    moved = 8 * _residual_bytes(shape, rows) + 3 * rows * shape.intermediate / ranks * ACTIVATION_BYTES
    rowwise = 3 * gpu.rowwise_s.value + moved / gpu.rowwise_bytes_per_s.value
    return Spent(products, 0.0, rowwise, sums, gpu.gap_s.value)


def _head(shape: DecoderShape, layout: Layout, rows: int) -> Spent:
    """The head over `rows` rows, and which rank has the best token."""
    head = products_s(layout.gpu, shape.vocab * shape.hidden / layout.ranks, rows, 1, ACTIVATION_BYTES)
    return Spent(head, sums=sum_s(layout.gpu, layout.ranks, rows * 8))


def _residual_bytes(shape: DecoderShape, rows: int) -> float:
    return rows * shape.hidden * ACTIVATION_BYTES
