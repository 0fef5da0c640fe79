"""Attention over paged KV on CUDA: the launches of `paged_kernels.py` and `prefill_kernels.py`, and their workspace.

Owns tile sizes, the number of context splits and the workspace in which splits meet. Knows nothing about
sequences or requests. Every launch goes to the current stream; the workspace is safe because all launches of
one instance follow each other on one stream. No host synchronisation, nothing read from the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from triton import next_power_of_2

from .interface import AttentionBatch, FusedAttention, Heads, RotaryQKV
from .kv_type import FP8
from .paged_kernels import decode_kernel
from .prefill_kernels import prefill_kernel
from .store_kernels import rotate_store_kernel, store_kernel

_MAX_SPLITS = 32
_SEQUENCES = 64  # of a prefill: what one binary of its kernel can count
_TOKENS_AHEAD = 256  # of a part of the context, asked for while the kernel waits


@dataclass(frozen=True, slots=True)
class DecodeTiles:
    """How one decode launch is cut: tokens a tile, parts of the context at most, warps, pipeline stages; whether
    the heads of a sequence are neighbours in the grid (else the sequences of a head are); tiles of a part at least."""

    block_n: int
    splits: int
    warps: int
    stages: int
    heads_first: bool = False
    least_tiles: int = 1


def choose_decode_tiles(rows: int, heads: Heads, multiprocessors: int, element_bytes: int) -> DecodeTiles:
    """Split the context until programs fill the device twice, not beyond: a reduction costs microseconds.

    Pure; measured on an H200 (bench/RESULTS.md). Five stages keep two tiles of K and V in
    flight; from 64 rows on the device is full without that.
    """
    splits = min(_power_of_two_below(max(1, 2 * multiprocessors // (rows * heads.kv))), _MAX_SPLITS)
    if element_bytes > 2 or heads.block_dim > 128:
        return DecodeTiles(block_n=32, splits=splits, warps=4, stages=2)
    if rows == 1 and heads.block_dim <= 64:
        return DecodeTiles(block_n=32, splits=splits, warps=4, stages=3)
    return DecodeTiles(block_n=64, splits=splits, warps=2, stages=3 if rows >= 64 and heads.block_dim > 64 else 5)


def choose_prefill_tiles(heads: Heads, max_query_tokens: int, element_bytes: int) -> tuple[int, int, int, int]:
    """(query tile, context tile, warps, stages) that fit shared memory; short chunks take short tiles.

    Pure; swept on an H200 over a long prompt, many short ones and a chunk (bench/RESULTS.md).
    """
    if element_bytes > 2:
        return 32, 32, 4, 2
    if heads.block_dim > 128:
        return 64, 32, 4, 2
    if max_query_tokens <= 32:
        return 32, 64, 4, 2
    return (64, 64, 4, 3) if heads.block_dim > 64 else (64, 128, 4, 3)


class PagedAttention:
    """On CUDA, for layers of the given shapes. `max_rows` bounds the rows of a decode launch."""

    name = "paged"
    capturable = True

    def __init__(
        self,
        shapes: Sequence[Heads],
        max_rows: int,
        device: torch.device,
        choose_tiles: Callable[[int, Heads, int, int], DecodeTiles] = choose_decode_tiles,
    ) -> None:
        """Raises ValueError for a head size that the kernels cannot take."""
        self._choose_tiles = choose_tiles
        self._multiprocessors = _multiprocessors(device)
        entries = arrivals = block_dim = 0
        for heads in set(shapes):
            if not 16 <= heads.dim <= 256 or heads.dim % 8:
                raise ValueError(f"head size {heads.dim}: the paged kernels take multiples of 8 from 16 to 256")
            block_dim = max(block_dim, heads.block_dim)
            arrivals = max(arrivals, max_rows * heads.kv)
            for rows in range(1, max_rows + 1):
                splits = choose_tiles(rows, heads, self._multiprocessors, 2).splits
                entries = max(entries, rows * heads.query * splits)
        self._partial_acc = torch.empty(entries * block_dim, dtype=torch.float32, device=device)
        self._partial_max = torch.empty(entries, dtype=torch.float32, device=device)
        self._partial_sum = torch.empty(entries, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(arrivals, dtype=torch.int32, device=device)

    def store(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        """Write K and V [T, kv_heads, head_dim] (last dimension contiguous) into the cache."""
        kv_heads, dim = key_cache.shape[2:]
        store_kernel[(key.shape[0],)](
            key,
            value,
            batch.slot_mapping,
            key_cache,
            value_cache,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            KVH=kv_heads,
            D=dim,
            BLOCK_H=next_power_of_2(kv_heads),
            BLOCK_D=next_power_of_2(dim),
            KV_FP8=key_cache.dtype == FP8,
            num_warps=4,
        )

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
        """`query` [T, heads, head_dim]; returns `out`, or a new tensor, contiguous and of that shape."""
        heads = Heads(query.shape[1], key_cache.shape[2], key_cache.shape[3])
        # Each token's heads must lie side by side: a projection's view does, a rotated copy may not.
        if query.stride(2) != 1 or query.stride(1) != heads.dim:
            query = query.contiguous()
        if batch.decode:
            return self._decode(
                heads, query, key_cache, value_cache, batch, scaling, sliding_window, softcap, sink_logits, out=out
            )
        if out is None:
            out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        block_m, block_n, warps, stages = choose_prefill_tiles(heads, batch.max_query_tokens, query.element_size())
        sequences = batch.context_lens.shape[0]
        most_tiles = query.shape[0] // block_m + sequences  # each sequence's last tile may be short
        prefill_kernel[(heads.query, most_tiles)](
            query,
            key_cache,
            value_cache,
            batch.block_tables,
            batch.context_lens,
            batch.query_starts,
            sink_logits if sink_logits is not None else query,
            out,
            scaling,
            softcap or 0.0,
            query.stride(0),
            batch.block_tables.stride(0),
            sliding_window or 0,
            sequences,
            H=heads.query,
            KVH=heads.kv,
            D=heads.dim,
            BLOCK_D=heads.block_dim,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            BLOCK_S=max(_SEQUENCES, next_power_of_2(sequences)),
            BLOCK_TOKENS=key_cache.shape[1],
            HAS_WINDOW=sliding_window is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_SINK=sink_logits is not None,
            KV_FP8=key_cache.dtype == FP8,
            num_warps=warps,
            num_stages=stages,
        )
        return out

    def fused(self) -> FusedAttention:
        return self

    def rotate_store(
        self,
        qkv: torch.Tensor,
        rotary: RotaryQKV,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        kv_heads, dim = key_cache.shape[2:]
        heads = qkv.shape[1] // dim - 2 * kv_heads
        rotate_store_kernel[(qkv.shape[0],)](
            qkv,
            rotary.cos,
            rotary.sin,
            positions,
            slot_mapping,
            rotary.query_norm if rotary.query_norm is not None else qkv,
            rotary.key_norm if rotary.key_norm is not None else qkv,
            key_cache,
            value_cache,
            rotary.norm_eps,
            H=heads,
            KVH=kv_heads,
            D=dim,
            BLOCK_H=next_power_of_2(heads + kv_heads),
            BLOCK_D=next_power_of_2(dim),
            HAS_NORM=rotary.query_norm is not None,
            KV_FP8=key_cache.dtype == FP8,
            num_warps=4,
        )
        return qkv[:, : heads * dim].view(-1, heads, dim)

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
        kv_heads, dim = key_cache.shape[2:]
        heads = Heads(qkv.shape[1] // dim - 2 * kv_heads, kv_heads, dim)
        fused = (rotary, table_rows)
        return self._decode(
            heads, qkv, key_cache, value_cache, batch, scaling, sliding_window, None, sink_logits, fused, overlap, out
        )

    def _decode(
        self,
        heads: Heads,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        batch: AttentionBatch,
        scaling: float,
        sliding_window: int | None,
        softcap: float | None,
        sink_logits: torch.Tensor | None,
        fused: tuple[RotaryQKV, torch.Tensor] | None = None,
        overlap: bool = False,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """A pointer that a variant does not read is given `query` in its place."""
        rows = query.shape[0]
        tiles = self._choose_tiles(rows, heads, self._multiprocessors, query.element_size())
        grid = (heads.kv, rows, tiles.splits) if tiles.heads_first else (rows, heads.kv, tiles.splits)
        rotary, table_rows = fused if fused is not None else (None, batch.context_lens)
        query_norm = rotary.query_norm if rotary is not None else None
        key_norm = rotary.key_norm if rotary is not None else None
        if out is None:
            out = torch.empty((rows, heads.query, heads.dim), dtype=query.dtype, device=query.device)
        decode_kernel[grid](
            query,
            rotary.cos if rotary is not None else query,
            rotary.sin if rotary is not None else query,
            query_norm if query_norm is not None else query,
            key_norm if key_norm is not None else query,
            key_cache,
            value_cache,
            batch.block_tables,
            table_rows,
            batch.context_lens,
            sink_logits if sink_logits is not None else query,
            out,
            self._partial_acc,
            self._partial_max,
            self._partial_sum,
            self._arrivals,
            scaling,
            softcap or 0.0,
            rotary.norm_eps if rotary is not None else 0.0,
            query.stride(0),
            batch.block_tables.stride(0),
            sliding_window or 0,
            H=heads.query,
            KVH=heads.kv,
            D=heads.dim,
            BLOCK_D=heads.block_dim,
            GROUP_PAD=heads.group_pad,
            GROUP_ROWS=heads.group_rows,
            BLOCK_N=tiles.block_n,
            BLOCK_TOKENS=key_cache.shape[1],
            SPLITS=tiles.splits,
            FUSED=fused is not None,
            HAS_NORM=query_norm is not None,
            HAS_WINDOW=sliding_window is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_SINK=sink_logits is not None,
            OVERLAP=overlap,
            TOKENS_AHEAD=_TOKENS_AHEAD,
            KV_FP8=key_cache.dtype == FP8,
            HEADS_FIRST=tiles.heads_first,
            LEAST_TILES=tiles.least_tiles,
            launch_pdl=overlap,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )
        return out


def _power_of_two_below(value: int) -> int:
    """The largest power of two that is at most `value`."""
    return 1 << (value.bit_length() - 1)


def _multiprocessors(device: torch.device) -> int:
    """1 on the CPU, where the kernels run under Triton's interpreter."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
