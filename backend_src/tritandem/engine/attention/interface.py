"""What a forward pass tells attention about its packed tokens, and what an attention backend must do.

Knows nothing about sequences, requests or sampling. All tensors live on the engine's device.
KV cache of one layer: two tensors [num_blocks, block_tokens, kv_heads, head_dim]; block 0 is the null block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """T packed tokens of S rows. In decode T == S (padded rows point at the null block, context length 0).

    The reach of row s is positions [0, context_lens[s]); its queries are the last query_len of them.
    """

    slot_mapping: torch.Tensor  # int64 [T] block * block_tokens + offset at which a token's K and V are stored
    block_tables: torch.Tensor  # int32 [S, max_blocks]
    context_lens: torch.Tensor  # int32 [S] tokens in the KV cache once this pass has stored its own
    query_starts: torch.Tensor  # int32 [S + 1] half-open ranges of packed tokens
    max_query_tokens: int
    max_context_tokens: int  # upper bound known on the host; fixes grid sizes, never read from the device
    decode: bool  # every row has exactly one query token


class AttentionBackend(Protocol):
    """One implementation of paged causal attention. Must be free of host synchronisation on CUDA."""

    name: str

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        """Write K and V [T, kv_heads, head_dim] into the cache at `batch.slot_mapping`."""

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Attention of `query` [T, heads, head_dim] over the cached context; same shape and dtype out.

        `sliding_window` w lets a query at position p see [max(0, p - w + 1), p].
        """
