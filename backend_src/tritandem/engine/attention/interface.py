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
    slots: torch.Tensor | None = None  # int64 [S] under which layers with a state keep it


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of one layer's attention. `query` is a multiple of `kv`."""

    query: int
    kv: int
    dim: int

    @property
    def block_dim(self) -> int:
        return _power_of_two(self.dim)

    @property
    def group_rows(self) -> int:
        """Query heads of one KV head, as a power of two."""
        return _power_of_two(self.query // self.kv)

    @property
    def group_pad(self) -> int:
        """The same, padded to what the matrix unit takes."""
        return max(16, self.group_rows)


@dataclass(frozen=True, slots=True)
class RotaryQKV:
    """What the fused decode needs besides the packed [S, (query + 2 * kv) * dim] projection."""

    cos: torch.Tensor  # float32 [max_positions, dim]
    sin: torch.Tensor
    query_norm: torch.Tensor | None  # [dim]
    key_norm: torch.Tensor | None
    norm_eps: float


class AttentionBackend(Protocol):
    """One implementation of paged causal attention; `registry.py` knows which there are."""

    name: str
    capturable: bool  # free of host synchronisation: a CUDA graph may hold it

    def fused(self) -> FusedAttention | None:
        """Itself where it can do a fused decoder's work, else None."""

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
        sink_logits: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of `query` [T, heads, head_dim] over the cached context; same shape and dtype out.

        `sliding_window` w lets a query at position p see [max(0, p - w + 1), p]. `sink_logits` [heads] take part in
        each head's softmax as one more score, neither scaled nor capped, with a value of zero.
        """


class FusedAttention(AttentionBackend, Protocol):
    """What a fused decoder asks for besides: work on the packed projection `qkv` [T, (query + 2 * kv) * dim]."""

    def attend(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        sink_logits: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As above; with `out` (contiguous, of the query's shape) it is written there."""

    def rotate_store(
        self,
        qkv: torch.Tensor,
        rotary: RotaryQKV,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        """Store rotated K and V of tokens at `positions` int64 [T] under `slot_mapping` int64 [T]; returns rotated Q
        [T, heads, dim], a view of `qkv`."""

    def decode_fused(
        self,
        qkv: torch.Tensor,
        rotary: RotaryQKV,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
        table_rows: torch.Tensor,
        scaling: float,
        sliding_window: int | None = None,
        sink_logits: torch.Tensor | None = None,
        overlap: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate, store and attend in one launch; `qkv` [S, (query + 2 * kv) * dim] comes unrotated.

        `table_rows` (int32 or int64 [S]) says which line of `batch.block_tables` belongs to each sequence.
        With `overlap` the launch may begin while the kernel before it ends (it waits before it reads).
        Returns [S, query heads, dim]; with `out` (contiguous, that many elements) it is written there.
        """


def _power_of_two(value: int) -> int:
    """The smallest that is at least `value`."""
    return 1 << (value - 1).bit_length()
