"""Decode attention alone, cut in several ways: how near it comes to the rate at which the device copies.

One launch as the engine makes it (rotary, store, attention over pages of 16) on random K and V in shuffled blocks.
Medians; the copy rate is measured in the same run. "head-major": as if each KV head had blocks of its own. A table and,
last, one JSON document. `--check` compares the ways with plain attention instead, also under Triton's interpreter.

    python -m tritandem_bench.attention --rows 64,256,384 --contexts 600,1500,4000 --kv bf16,fp8_e4m3
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tritandem.engine.attention.dense import DenseAttention
from tritandem.engine.attention.interface import AttentionBatch, Heads, RotaryQKV
from tritandem.engine.attention.kv_type import as_cached, resolve_kv_type
from tritandem.engine.attention.paged import DecodeTiles, PagedAttention, choose_decode_tiles
from tritandem.engine.runners.streams import cuda_event

BLOCK_TOKENS = 16
COPY_BYTES = 2 << 30
LAUNCHES, ROUNDS = 10, 5
_TOLERANCE = 2e-2


@dataclass(frozen=True)
class Way:
    """What differs from the tiles that the engine chooses; `head_major`: another layout of the cache."""

    name: str
    change: dict[str, Any] = dataclasses.field(default_factory=dict)
    head_major: bool = False

    def tiles(self, rows: int, heads: Heads, multiprocessors: int, element_bytes: int) -> DecodeTiles:
        return dataclasses.replace(choose_decode_tiles(rows, heads, multiprocessors, element_bytes), **self.change)


WAYS = [
    Way("chosen"),
    Way("heads first", {"heads_first": True}),
    Way("2 parts", {"splits": 2, "least_tiles": 4}),
    Way("4 parts", {"splits": 4, "least_tiles": 4}),
    Way("heads first, 2 parts", {"heads_first": True, "splits": 2, "least_tiles": 4}),
    Way("heads first, 4 parts", {"heads_first": True, "splits": 4, "least_tiles": 4}),
    Way("heads first, 4 parts, 5 stages", {"heads_first": True, "splits": 4, "least_tiles": 4, "stages": 5}),
    Way("heads first, 128 a tile, 4 warps", {"heads_first": True, "block_n": 128, "warps": 4, "stages": 3}),
    Way("head-major", head_major=True),
    Way("head-major, 2 parts", {"splits": 2, "least_tiles": 4}, head_major=True),
    Way("head-major, 4 parts", {"splits": 4, "least_tiles": 4}, head_major=True),
]


def sweep() -> list[Way]:
    """Every combination of sizes, in both orders of the grid."""
    axes: dict[str, Sequence[Any]] = {
        "block_n": (32, 64, 128),
        "splits": (1, 2, 4, 8),
        "warps": (2, 4),
        "stages": (3, 4, 5),
        "heads_first": (False, True),
    }
    changes = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [
        Way("chosen"),
        *(Way(" ".join(map(str, change.values())), {**change, "least_tiles": 4}) for change in changes),
    ]


class Launch:
    """One decode launch of `rows` sequences of `context` tokens, the new one included."""

    def __init__(
        self, way: Way, rows: int, context: int, heads: Heads, kv_type: torch.dtype, device: torch.device
    ) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        blocks_each = -(-context // BLOCK_TOKENS)
        blocks = 1 + rows * blocks_each
        tables = (torch.randperm(blocks - 1, device=device) + 1).view(rows, blocks_each)
        if way.head_major:  # block b of head h is block b * kv + h of a cache with one head
            each = torch.arange(heads.kv, device=device)[None, :, None]
            tables = (tables[:, None] * heads.kv + each).view(rows * heads.kv, blocks_each)
            rows, blocks, heads = rows * heads.kv, blocks * heads.kv, Heads(heads.query // heads.kv, 1, heads.dim)
        self.heads, self.scaling = heads, heads.dim**-0.5
        shape = (blocks, BLOCK_TOKENS, heads.kv, heads.dim)
        self.keys, self.values = (_random_cache(shape, dtype, kv_type, device) for _ in range(2))
        self.qkv = torch.randn(rows, (heads.query + 2 * heads.kv) * heads.dim, device=device, dtype=dtype)
        angles = torch.rand(context, heads.dim // 2, device=device).repeat(1, 2)
        self.rotary = RotaryQKV(angles.cos().contiguous(), angles.sin().contiguous(), None, None, 1e-6)
        self.table_rows = torch.arange(rows, dtype=torch.int32, device=device)
        lens = torch.full((rows,), context, dtype=torch.int32, device=device)
        at = context - 1
        self.batch = AttentionBatch(
            slot_mapping=tables[:, at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS,
            block_tables=tables.int().contiguous(),
            context_lens=lens,
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
            max_query_tokens=1,
            max_context_tokens=context,
            decode=True,
        )
        self.backend = PagedAttention([heads], rows, device, way.tiles)
        self.bytes = 2 * rows * context * heads.kv * heads.dim * kv_type.itemsize

    def run(self) -> torch.Tensor:
        return self.backend.decode_fused(
            self.qkv, self.rotary, self.keys, self.values, self.batch, self.table_rows, self.scaling
        )

    def error(self) -> float:
        """Relative, of `run` against the dense reference over the cache as it is afterwards."""
        got = self.run().float()
        positions = torch.full((self.qkv.shape[0],), self.batch.max_context_tokens - 1, device=self.qkv.device)
        query = self.backend.rotate_store(
            self.qkv.clone(), self.rotary, self.keys.clone(), self.values.clone(), positions, self.batch.slot_mapping
        )
        want = DenseAttention().attend(query.float(), self.keys, self.values, self.batch, self.scaling)
        return float((got - want).norm() / want.norm())


def _random_cache(
    shape: tuple[int, ...], dtype: torch.dtype, kv_type: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Block by block, so that the wider values never lie in memory all at once."""
    cache = torch.empty(shape, dtype=kv_type, device=device)
    for part in torch.split(cache, 4096):
        part.copy_(as_cached(torch.randn(part.shape, dtype=dtype, device=device), kv_type))
    return cache


def copy_bytes_per_s(device: torch.device) -> float:
    """Read and written, of one large copy."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device).zero_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / statistics.median(_seconds(lambda: target.copy_(source)) for _ in range(ROUNDS))


def _seconds(call: Callable[[], Any]) -> float:
    """Of one call, on the device."""
    call()
    start, end = cuda_event(timing=True), cuda_event(timing=True)
    start.record()
    for _ in range(LAUNCHES):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / LAUNCHES


def measure(
    ways: Sequence[Way], rows: int, context: int, heads: Heads, kv: str, device: torch.device, copy_rate: float
) -> list[dict[str, Any]]:
    """Each way by its median; what the device cannot hold or compile is left out, with a line that says so."""
    kv_type = resolve_kv_type(kv, torch.bfloat16, device)
    found = []
    for way in ways:
        try:
            launch = Launch(way, rows, context, heads, kv_type, device)
            seconds = statistics.median(_seconds(launch.run) for _ in range(ROUNDS))
        except (RuntimeError, ValueError) as error:  # Triton's errors of resources among them
            print(f"{way.name}: {type(error).__name__}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        rate = launch.bytes / seconds
        found.append(
            {
                "rows": rows,
                "context": context,
                "kv_dtype": kv,
                "way": way.name,
                "us": round(seconds * 1e6, 1),
                "gb_per_s": round(rate / 1e9),
                "share_of_copy": round(rate / copy_rate, 3),
            }
        )
        del launch
    return found


def check(ways: Sequence[Way], heads: Heads, kv: str, device: torch.device) -> dict[str, float]:
    """Relative error of each way, over a context that has several parts and ends in the middle of a block."""
    kv_type = resolve_kv_type(kv, torch.float32, device)
    return {way.name: Launch(way, 3, 333, heads, kv_type, device).error() for way in ways}


def table(rows: Sequence[dict[str, Any]]) -> str:
    line = "{rows:>5}{context:>9}{kv_dtype:>10}  {way:34}{us:>9.1f}{gb_per_s:>8}{share_of_copy:>8.1%}"
    head = f"{'rows':>5}{'context':>9}{'KV':>10}  {'way':34}{'us':>9}{'GB/s':>8}{'of copy':>8}"
    return "\n".join([head, *(line.format(**row) for row in rows)])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser.add_argument("--rows", type=numbers, default=[64, 256, 384])
    parser.add_argument("--contexts", type=numbers, default=[600, 1500, 4000])
    parser.add_argument("--kv", default="bf16,fp8_e4m3", help="types of the cache, separated by commas")
    parser.add_argument("--heads", type=numbers, default=[32, 8, 128], help="query heads, KV heads, head size")
    parser.add_argument("--sweep", action="store_true", help="every combination of sizes instead of the named ways")
    parser.add_argument("--check", action="store_true", help="compare with plain attention; times nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse(arguments)
    ways, heads, kinds = sweep() if args.sweep else WAYS, Heads(*args.heads), args.kv.split(",")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not (args.check and interpreted):
        print("attention: needs a CUDA device; --check also runs with TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.check:
        errors = {kv: check(ways, heads, kv, device) for kv in kinds}
        print(json.dumps(errors))
        return 0 if all(error < _TOLERANCE for of_kind in errors.values() for error in of_kind.values()) else 1
    copy_rate = copy_bytes_per_s(device)
    print(f"{torch.cuda.get_device_name(device)}: copies {copy_rate / 1e9:.0f} GB/s, read and written")
    found = []
    for kv, rows, context in itertools.product(kinds, args.rows, args.contexts):
        found += measure(ways, rows, context, heads, kv, device, copy_rate)
    print(table(found))
    print(json.dumps({"device": torch.cuda.get_device_name(device), "copy_bytes_per_s": copy_rate, "rows": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
