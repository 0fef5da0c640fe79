"""Which part of a model one rank holds: queries, keys, values, gate and up by rows, out and down by columns.

Owns the cut and its refusals. Heads stay whole, key and value heads fewer than ranks stand on several, embedding and
norms on all; the head is cut by vocabulary where that divides. Knows nothing about where weights come from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import skip_init
from transformers import PreTrainedConfig, PreTrainedModel

from ...contracts.errors import ConfigError
from ..parallel.interface import Rank

_ROWS, _COLUMNS = 0, 1  # dimensions of a weight [out, in]
_SPAN = "tritandem_span"  # attribute of a cut layer
HEAD = "lm_head"
OUT, DOWN = "o_proj", "down_proj"  # whose products are partial sums


@dataclass(frozen=True, slots=True)
class Span:
    """Of `size` entries along dimension `dim` of a weight: [start, end)."""

    dim: int
    size: int
    start: int
    end: int

    def of(self, tensor: Any) -> torch.Tensor:
        """Of anything that is indexed as a tensor is."""
        part: torch.Tensor = tensor[self.start : self.end] if self.dim == _ROWS else tensor[:, self.start : self.end]
        return part


class Share:
    """What `rank` holds of the model of `config`."""

    def __init__(self, config: PreTrainedConfig, rank: Rank) -> None:
        """Raises ConfigError naming the dimension that does not divide."""
        text: Any = config.get_text_config()
        self.rank, self._kind, self._tied = rank, text.model_type, bool(config.tie_word_embeddings)
        count, heads = rank.count, int(text.num_attention_heads)
        kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        inner = int(getattr(text, "intermediate_size", None) or 0)
        self._divides("num_attention_heads", heads)
        self._divides("intermediate_size", inner)
        if kv_heads % count and count % kv_heads:
            self._refuse("num_key_value_heads", kv_heads, "a multiple or a divisor")
        self.heads, self.kv_heads = heads // count, max(1, kv_heads // count)
        first_kv = rank.index * kv_heads // count
        query = self._even(_ROWS, heads * head_dim)
        key = Span(_ROWS, kv_heads * head_dim, first_kv * head_dim, (first_kv + self.kv_heads) * head_dim)
        self._spans: Mapping[str, Span] = {
            "q_proj": query,
            "k_proj": key,
            "v_proj": key,
            OUT: self._even(_COLUMNS, heads * head_dim),
            "gate_proj": self._even(_ROWS, inner),
            "up_proj": self._even(_ROWS, inner),
            DOWN: self._even(_COLUMNS, inner),
        }
        self._norms = {True: (head_dim,), False: (int(text.hidden_size),)}  # shapes of theirs, in attention and not
        vocab_size = int(text.vocab_size)
        self.head = None if vocab_size % count else self._even(_ROWS, vocab_size)

    def span(self, layer: str) -> Span | None:
        """Of the linear layer of this name; None: all of it."""
        last = layer.rpartition(".")[2]
        if last == HEAD:
            return None if self._tied else self.head
        return self._spans.get(last)

    def part(self, name: str, weight: Any) -> torch.Tensor | None:
        """This rank's part of the weight or bias `name`, read from `weight` if that is lazy; None: it has none."""
        layer, _, kind = name.rpartition(".")
        span = self.span(layer)
        if not self.holds(name):
            return None
        if span is None or (kind == "bias" and span.dim == _COLUMNS):
            whole: torch.Tensor = weight[...]
            return whole
        return span.of(weight)

    def holds(self, name: str) -> bool:
        """Whether it has any of the weight or bias `name`: a bias is added to a sum once."""
        layer, _, kind = name.rpartition(".")
        span = self.span(layer)
        return kind != "bias" or span is None or span.dim == _ROWS or self.rank.index == 0

    def model_class(self, whole: type[PreTrainedModel], random: bool = False) -> type[PreTrainedModel]:
        """A class whose models are built with this rank's part only. `random`: their weights will be initialised, to
        this rank's part of what one rank's would be."""
        share = self

        class Part(whole):  # type: ignore[misc]
            def __init__(self, config: PreTrainedConfig, *args: Any, **options: Any) -> None:
                super().__init__(config, *args, **options)
                share._shrink(self)
                if random:
                    for module in self.modules():
                        if isinstance(module, PreTrainedModel):
                            vars(module)["_init_weights"] = partial(share._initialise, module._init_weights)

        Part.__name__ = Part.__qualname__ = whole.__name__
        Part.__module__ = whole.__module__
        return Part

    # -- building --------------------------------------------------------------------------------------

    def _shrink(self, model: PreTrainedModel) -> None:
        """Raises ConfigError naming a layer that cannot be cut."""
        cut: set[str] = set()
        for name, module in list(model.named_modules()):
            span = self.span(name)
            if span is None:
                continue
            if type(module) is not nn.Linear:
                raise ConfigError(f"{self._kind}: {name} is no plain linear layer and cannot be cut over ranks")
            shape = [module.out_features, module.in_features]
            if shape[span.dim] != span.size:
                raise ConfigError(f"{self._kind}: {name} has {shape[span.dim]} features, not {span.size}: not cut")
            shape[span.dim] = span.end - span.start
            bias = module.bias is not None and self.holds(f"{name}.bias")
            weight = module.weight
            part = _linear(shape, bias, weight)
            vars(part)[_SPAN] = span
            model.set_submodule(name, part)
            cut.add(name)
        ends = {name.rpartition(".")[2] for name in cut}
        if missing := [name for name in self._spans if name not in ends]:
            raise ConfigError(f"{self._kind}: has no {missing[0]}: its layers cannot be cut over ranks")
        for name, parameter in model.named_parameters():
            layer = name.rpartition(".")[0]
            if layer in cut or ".layers." not in f".{name}":
                continue
            if tuple(parameter.shape) != self._norms[".self_attn." in name]:
                raise ConfigError(f"{self._kind}: {layer} cannot be cut over ranks")
        for module in model.modules():
            for attribute, value in (
                ("num_heads", self.heads),
                ("num_key_value_heads", self.kv_heads),
                ("num_key_value_groups", self.heads // self.kv_heads),
            ):
                if hasattr(module, attribute):
                    setattr(module, attribute, value)

    def _initialise(self, own: Callable[[nn.Module], None], module: nn.Module) -> None:
        """As `own`, the model's `_init_weights`; a cut layer gets its part of what the whole one would have got."""
        span: Span | None = getattr(module, _SPAN, None)
        if span is None:
            own(module)
            return
        assert isinstance(module, nn.Linear)
        weight, bias = module.weight.data, module.bias
        shape = [weight.shape[0], weight.shape[1]]
        shape[span.dim] = span.size
        whole = _linear(shape, bias is not None, weight)
        own(whole)
        weight.copy_(span.of(whole.weight.data))
        if bias is not None:
            bias.data.copy_(span.of(whole.bias.data) if span.dim == _ROWS else whole.bias.data)

    # -- dimensions ------------------------------------------------------------------------------------

    def _even(self, dim: int, size: int) -> Span:
        part = size // self.rank.count
        return Span(dim, size, self.rank.index * part, (self.rank.index + 1) * part)

    def _divides(self, what: str, size: int) -> None:
        if size % self.rank.count:
            self._refuse(what, size, "a multiple")

    def _refuse(self, what: str, size: int, allowed: str) -> None:
        count = self.rank.count
        raise ConfigError(f"{self._kind} over {count} ranks: {what} is {size}, allowed: {allowed} of {count}")


def _linear(shape: list[int], bias: bool, like: torch.Tensor) -> nn.Linear:
    """[out, in], without values."""
    options = {"device": like.device, "dtype": like.dtype}
    linear: nn.Linear = skip_init(nn.Linear, shape[1], shape[0], bias, **options)  # type: ignore[no-untyped-call]
    return linear
