"""The mixture of experts of a fused layer: norm, router and experts in our kernels, or norm and the module's own code.

Which routing a family means is found by asking its router about random values. What is not known, routers with groups
or biases and experts shared by all tokens among it, runs as the module says; its experts are products even then.
"""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from ..linear.few_rows import choose_linear_tiles, few_row_linear
from ..linear.interface import How, Norm, Unfusable
from ..linear.rowwise import add_norm
from .launches import route
from .registry import product_of

log = logging.getLogger(__name__)

_PROBE_TOKENS = 8


class _Router:
    """Logits, and the `route` of them that gives what the module's router gives."""

    def __init__(self, module: Any) -> None:
        """Raises Unfusable."""
        names = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
        if not {"weight"} <= names <= {"weight", "bias"} or module.weight.dim() != 2:
            raise Unfusable("its router has other parts")
        self.weight = module.weight.data
        self._bias = module.bias.data if "bias" in names else None
        self._per_token, self._sum_to_one = self._find(module)

    def __call__(self, x: torch.Tensor, how: How) -> tuple[torch.Tensor, torch.Tensor]:
        experts, inner = self.weight.shape
        tiles = choose_linear_tiles(x.shape[0], experts, inner, x.dtype) if how.fuse else None
        if tiles is None:
            logits = F.linear(x, self.weight, self._bias)
        else:
            logits = few_row_linear(x, self.weight, tiles, bias=self._bias, overlap=how.overlap)
        return route(logits, self._per_token, self._sum_to_one, how.overlap)

    def _find(self, module: Any) -> tuple[int, bool]:
        """How many experts a token gets, and whether their weights are to sum to one."""
        x = _probe(self.weight.shape[1], self.weight)
        answer = module(x)
        if not isinstance(answer, tuple) or len(answer) != 3:
            raise Unfusable("its router answers in another form")
        logits, wanted, experts = answer
        if not wanted.shape == experts.shape == (len(x), experts.shape[-1]):
            raise Unfusable("its router answers in another form")
        for sum_to_one in (True, False):
            index, scores = route(logits.contiguous(), experts.shape[1], sum_to_one)
            # Equal logits may be taken in any order.
            same = torch.equal(logits.gather(1, index.long()), logits.gather(1, experts.long()))
            if same and torch.allclose(scores, wanted.float(), atol=1e-2, rtol=2e-2):
                return experts.shape[1], sum_to_one
        raise Unfusable("its router chooses in another way")


class RoutedExperts:
    """Owns nothing: weights stay the module's and the product's."""

    def __init__(self, mlp: nn.Module, norm: Norm) -> None:
        self._mlp, self._norm = mlp, norm
        self._router: _Router | None = None
        children = dict(mlp.named_children())
        experts = children.pop("experts", None)
        self._experts = product_of(experts) if experts is not None else None
        if self._experts is not None and len(children) == 1:
            try:
                self._router = _Router(next(iter(children.values())))
                self._check_agreement(next(mlp.get_submodule("experts").parameters()).dtype)
            except Exception as reason:  # whatever does not run here must cost speed, not the model
                log.info("its router runs on transformers' own code: %s", reason)
                self._router = None

    @property
    def own_router(self) -> bool:
        return self._router is not None

    def __call__(self, residual: torch.Tensor, delta: torch.Tensor | None, how: How) -> torch.Tensor | None:
        """residual [T, inner] += delta, in place; the experts' sum of its norm, or None where it was added as well."""
        x = add_norm(delta, residual, self._norm, how.overlap)
        return self._run(x, residual, how)

    def _run(self, x: torch.Tensor, residual: torch.Tensor | None, how: How) -> torch.Tensor | None:
        if self._router is None or self._experts is None:
            out = self._mlp(x[None])
            return cast(torch.Tensor, (out[0] if isinstance(out, tuple) else out).view_as(x))
        index, scores = self._router(x, how)
        return self._experts(x, index, scores, residual, how.overlap)

    @torch.inference_mode()
    def _check_agreement(self, dtype: torch.dtype) -> None:
        """With the module's own code over random tokens; `dtype`: the experts'. Raises Unfusable."""
        assert self._router is not None
        if self._router.weight.dtype != dtype:
            raise Unfusable(f"its router computes in {self._router.weight.dtype}")
        x = _probe(len(self._norm.weight), self._router.weight)
        ours = self._run(x, None, How())
        theirs = self._mlp(x[None])
        theirs = (theirs[0] if isinstance(theirs, tuple) else theirs).view_as(x).float()
        assert ours is not None
        error = float((ours.float() - theirs).norm() / theirs.norm().clamp(min=1e-6))
        if not error <= (1e-3 if x.dtype == torch.float32 else 0.15):
            raise Unfusable("its experts are put together in another way")


def _probe(inner: int, like: torch.Tensor) -> torch.Tensor:
    """Random tokens [.., inner] of the dtype and on the device of `like`."""
    x = torch.randn(_PROBE_TOKENS, inner, generator=torch.Generator().manual_seed(3))
    return x.to(like.device, like.dtype)
