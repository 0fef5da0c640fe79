"""The gated delta rule by transformers' own functions: sequence by sequence, single tokens of many together.

The slow twin of `launches.py`. It asks the device how long each sequence is, so no graph can hold it.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch.nn import functional

from ...attention.interface import AttentionBatch
from .interface import DeltaInputs, DeltaLayer


@dataclass(frozen=True, slots=True)
class _Part:
    """Sequences of one length that go on together."""

    slots: list[int]
    tokens: list[int]  # packed indices, sequence by sequence
    fresh: bool


def delta_rule(
    layer: DeltaLayer, inputs: DeltaInputs, conv: torch.Tensor, recurrent: torch.Tensor, batch: AttentionBatch
) -> torch.Tensor:
    """As of `interface.DeltaRule`."""
    mixed = torch.cat([part.flatten(1) for part in (inputs.query, inputs.key, inputs.value)], dim=1)
    beta = inputs.beta.flatten(1).sigmoid() * layer.beta_scale
    rate = -layer.log_rate.float().exp()
    decay = rate * functional.softplus(inputs.decay.flatten(1).float() + layer.decay_bias)
    shape = layer.shape
    out = mixed.new_zeros((len(mixed), shape.heads, shape.value_dim))
    for part in _parts(batch):
        rows = torch.tensor(part.slots, device=mixed.device)
        tokens = torch.tensor(part.tokens, device=mixed.device).view(len(rows), -1)
        before = conv.new_zeros((len(rows), *shape.conv_state)) if part.fresh else conv[rows]
        seen = torch.cat((before, mixed[tokens].transpose(1, 2)), dim=2)
        conv[rows] = seen[:, :, seen.shape[2] - shape.kernel + 1 :]
        convolved = functional.conv1d(seen, layer.conv_weight[:, None], groups=shape.channels)
        state = None if part.fresh else recurrent[rows]
        convolved = functional.silu(convolved).transpose(1, 2)
        out[tokens], recurrent[rows] = _advance(layer, convolved, beta[tokens], decay[tokens], state)
    gate = inputs.gate.reshape(-1, shape.value_dim)
    normed: torch.Tensor = layer.norm(out.view(-1, shape.value_dim), gate)
    return normed.view(len(mixed), -1)


def _parts(batch: AttentionBatch) -> list[_Part]:
    assert batch.slots is not None
    parts: list[_Part] = []
    singles = _Part([], [], fresh=False)
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    for row, (slot, context) in enumerate(zip(batch.slots.tolist(), contexts, strict=True)):
        begin, end = starts[row], starts[row + 1]
        if context == 0:
            continue
        if end - begin == 1 < context:
            singles.slots.append(slot)
            singles.tokens.append(begin)
        else:
            parts.append(_Part([slot], list(range(begin, end)), fresh=context == end - begin))
    return [*parts, singles] if singles.slots else parts


def _advance(
    layer: DeltaLayer, mixed: torch.Tensor, beta: torch.Tensor, decay: torch.Tensor, state: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """mixed [B, n, channels], beta and decay [B, n, heads] -> [B, n, heads, value_dim] and the new states."""
    shape = layer.shape
    keys = shape.groups * shape.key_dim
    query, key, value = torch.split(mixed, [keys, keys, shape.heads * shape.value_dim], dim=2)
    query, key = (
        part.view(*part.shape[:2], shape.groups, -1).repeat_interleave(shape.group_heads, dim=2)
        for part in (query, key)
    )
    own = sys.modules[type(layer.module).__module__]
    once = mixed.shape[1] == 1
    rule = own.torch_recurrent_gated_delta_rule if once else own.torch_chunk_gated_delta_rule
    out, after = rule(
        query,
        key,
        value.view(*value.shape[:2], shape.heads, -1),
        g=decay,
        beta=beta,
        initial_state=state,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out, after
