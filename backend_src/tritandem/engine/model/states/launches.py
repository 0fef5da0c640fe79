"""The gated delta rule in two launches, whatever the sequences of a pass: chunks of prompts, single tokens, padding.

The fast twin of `reference.py`. Launches on the current stream without host synchronisation: a graph may hold it.
"""

from __future__ import annotations

import torch
from triton import next_power_of_2

from ...attention.interface import AttentionBatch
from .interface import DeltaInputs, DeltaLayer
from .kernels import conv_kernel, delta_kernel

_TOKENS_AT_ONCE = 16
_STATE_A_WARP = 2048  # elements of a state: 64 registers a thread


def delta_rule(
    layer: DeltaLayer, inputs: DeltaInputs, conv: torch.Tensor, recurrent: torch.Tensor, batch: AttentionBatch
) -> torch.Tensor:
    """As of `interface.DeltaRule`."""
    assert batch.slots is not None
    shape, query, key, value = layer.shape, inputs.query, inputs.key, inputs.value
    tokens, rows = query.shape[0], batch.slots.shape[0]
    one_token = batch.max_query_tokens == 1
    sizes = {"GROUPS": shape.groups, "GROUP_HEADS": shape.group_heads, "DK": shape.key_dim, "DV": shape.value_dim}
    lengths = batch.slots, batch.query_starts, batch.context_lens
    convolved = torch.empty((tokens, shape.channels), dtype=query.dtype, device=query.device)
    conv_kernel[(2 * shape.groups + shape.heads, rows)](
        query,
        layer.conv_weight,
        conv,
        *lengths,
        convolved,
        query.stride(0),
        key.storage_offset() - query.storage_offset(),
        value.storage_offset() - query.storage_offset(),
        query.stride(1),
        value.stride(1),
        **sizes,
        KERNEL=shape.kernel,
        BLOCK_D=next_power_of_2(max(shape.key_dim, shape.value_dim)),
        BLOCK_T=1 if one_token else _TOKENS_AT_ONCE,
        BLOCK_S=next_power_of_2(shape.kernel - 1),
        num_warps=1 if one_token else 4,
    )
    out = torch.empty((tokens, shape.heads * shape.value_dim), dtype=query.dtype, device=query.device)
    block_k, block_v = next_power_of_2(shape.key_dim), next_power_of_2(shape.value_dim)
    delta_kernel[(shape.heads, rows)](
        convolved,
        inputs.gate,
        inputs.beta,
        inputs.decay,
        layer.log_rate,
        layer.decay_bias,
        layer.norm_weight,
        recurrent,
        *lengths,
        out,
        inputs.gate.stride(0),
        inputs.gate.stride(1),
        inputs.beta.stride(0),
        inputs.beta.stride(1),
        inputs.decay.stride(0),
        inputs.decay.stride(1),
        layer.norm_eps,
        layer.beta_scale,
        shape.key_dim**-0.5,
        **sizes,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
        num_warps=min(8, max(1, block_k * block_v // _STATE_A_WARP)),
    )
    return out
