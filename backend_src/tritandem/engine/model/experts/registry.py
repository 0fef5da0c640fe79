"""Who multiplies the experts of a model: by what they are, a format of weights is one line here.

Registers transformers' experts function `tritandem`, which hands each layer to its product. A layer that no format
takes, or whose product disagrees with transformers' own on a probe, stays with transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from ..linear.interface import Unfusable
from .interface import LIBRARY, ExpertsProduct

EXPERTS_NAME = "tritandem"
_PRODUCT = "tritandem_product"  # attribute of an experts module
_PROBE_TOKENS = (1, 8)  # few and many for an expert


@dataclass(frozen=True, slots=True)
class Format:
    """`product(module)` raises Unfusable for what it cannot take."""

    handles: Callable[[nn.Module], bool]
    product: Callable[[nn.Module], ExpertsProduct]


def _dense() -> Format:
    from . import dense  # needs the Triton language, which a CPU's torch comes without

    return Format(dense.handles, dense.DenseExperts)


# The first that handles a module multiplies it.
FORMATS: tuple[Callable[[], Format], ...] = (_dense,)


def use_products(model: PreTrainedModel) -> str | None:
    """Give every mixture of experts of `model` its product; None where there is none. Returns in words what runs."""
    modules = [module for module in model.modules() if hasattr(module, "_apply_gate")]
    if not modules:
        return None
    refused: list[str] = []
    agreed: set[Any] = set()  # kinds of experts whose product was found right: layers of one kind differ in values only
    for module in modules:
        try:
            setattr(module, _PRODUCT, _checked(module, agreed))
        except Unfusable as reason:
            refused.append(str(reason))
    if len(refused) < len(modules):
        model.set_experts_implementation(EXPERTS_NAME)
    return f"{len(refused)} on transformers' own code: {refused[0]}" if refused else "own kernels"


def product_of(module: nn.Module) -> ExpertsProduct | None:
    return cast("ExpertsProduct | None", getattr(module, _PRODUCT, None))


def has_products(module: nn.Module) -> bool:
    return any(product_of(part) is not None for part in module.modules())


def _checked(module: nn.Module, agreed: set[Any]) -> ExpertsProduct:
    """Raises Unfusable."""
    kind = (type(module), *((name, weight.shape, weight.dtype) for name, weight in module.named_parameters()))
    for known in (load() for load in FORMATS):
        if known.handles(module):
            product = known.product(module)
            if kind not in agreed:
                try:
                    _check_agreement(module, product)
                except Unfusable:
                    raise
                except Exception as error:  # whatever does not run here must cost speed, not the model
                    raise Unfusable(f"kernels do not run here: {type(error).__name__}: {error}") from error
                agreed.add(kind)
            return product
    raise Unfusable(f"{type(module).__name__} holds its weights in an unknown form")


@torch.inference_mode()
def _check_agreement(module: nn.Module, product: ExpertsProduct) -> None:
    """The product and transformers' own function over the same random tokens. Raises Unfusable when they differ."""
    experts: Any = module
    device, dtype = experts.down_proj.device, experts.down_proj.dtype
    count, inner = experts.down_proj.shape[0], experts.down_proj.shape[2 if experts.is_transposed else 1]
    generator = torch.Generator().manual_seed(2)
    per_token = min(2, count)
    for tokens in _PROBE_TOKENS:
        x = torch.randn(tokens, inner, generator=generator).to(device, dtype)
        index = torch.rand(tokens, count, generator=generator).topk(per_token).indices.to(device)
        scores = torch.rand(tokens, per_token, generator=generator).to(device, dtype)
        theirs = ALL_EXPERTS_FUNCTIONS[LIBRARY](module, x, index, scores).float()
        ours = product(x, index, scores)
        assert ours is not None
        error = float((ours.float() - theirs).norm() / theirs.norm().clamp(min=1e-6))
        limit = 1e-3 if dtype == torch.float32 else 0.05
        if not error <= limit:
            raise Unfusable(f"its experts' result differs by {error:.1e} (relative), allowed: {limit:.0e}")


def experts_forward(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What transformers calls for each mixture of experts: hidden_states [T, inner], the others [T, per_token]."""
    call: Any = product_of(module) or partial(ALL_EXPERTS_FUNCTIONS[LIBRARY], module)
    return cast(torch.Tensor, call(hidden_states.contiguous(), top_k_index.contiguous(), top_k_weights.contiguous()))


ALL_EXPERTS_FUNCTIONS.register(EXPERTS_NAME, experts_forward)
