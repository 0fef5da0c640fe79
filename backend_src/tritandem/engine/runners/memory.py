"""How much of the device's memory the KV cache gets: measured, not guessed.

Owns the sizing. The largest prefill and decode are run once on a tiny cache; what they needed at their peak
stays free, and so does what the pool of the graphs will hold: one pass of the largest captured size, because
graphs share it. Of the rest `kv_memory_fraction` becomes KV blocks. Loading thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from ...config import EngineConfig
from ...contracts.errors import ConfigError
from ..attention.interface import AttentionBatch
from ..attention.kv_type import resolve_kv_type
from ..model.loader import LoadedModel
from ..model.packed import KvCache, kv_bytes_per_token, window_tokens
from ..step import TABLE_PLACES, RunnerSpec, stretched_tokens
from .company import ALONE, Company
from .pass_size import row_buckets, token_buckets

if TYPE_CHECKING:
    from ..model.device_forward import DeviceForward

DEFAULT_PREFILL_TOKENS = 8192
_GRAPH_BYTES = 2 << 20  # of one beside what all share: 1.5 MiB with the 300 launches of a 30-layer model on an H200
DEFAULT_INTERLEAVED_TOKENS = 2048  # 46 ms of an 8B model on an H200


def cuda_spec(loaded: LoadedModel, config: EngineConfig, num_blocks: int, max_rows: int) -> RunnerSpec:
    """Pure. The efficient chunk is not measured yet."""
    interleaved = interleaved_tokens(config)
    return RunnerSpec(
        device=str(loaded.model.device),
        num_slots=max_rows,
        num_blocks=num_blocks,
        block_tokens=config.block_tokens,
        max_context_tokens=loaded.served_context(config, num_blocks),
        prefill_tokens_per_step=_prefill_tokens(config),
        interleaved_prefill_tokens=interleaved,
        efficient_prefill_tokens=((max_rows, interleaved),),
        vocab_size=loaded.vocab_size,
        launch_ahead_steps=config.launch_ahead_steps,
        table_places=TABLE_PLACES,
        window_tokens=window_tokens(loaded.layers),
        stateful=loaded.state_bytes > 0,
    )


def choose_num_blocks(free_bytes: int, peak_bytes: int, fraction: float, block_bytes: int, useful_blocks: int) -> int:
    """Blocks, the null block included. Pure; `useful_blocks` is what all slots at full context could fill.

    Raises ConfigError when not even one sequence's first block fits.
    """
    blocks = int((free_bytes - peak_bytes) * fraction) // block_bytes
    if blocks < 2:
        raise ConfigError(
            f"the weights leave {free_bytes >> 20} MiB and a step needs {peak_bytes >> 20} MiB of them: "
            "no room for a KV cache; a smaller prefill_tokens_per_step or max_sequences may help"
        )
    return min(blocks, useful_blocks)


def measure_and_allocate(
    loaded: LoadedModel,
    config: EngineConfig,
    forward: DeviceForward,
    max_rows: int,
    on_progress: Callable[[str], None],
    company: Company = ALONE,
) -> KvCache:
    """The KV cache, of as many blocks as the least of the ranks has room for. Raises ConfigError, or
    torch.OutOfMemoryError when the trial step itself does not fit."""
    model = loaded.model
    device = torch.device(model.device)
    kv_type = resolve_kv_type(config.kv_dtype, model.dtype, device)
    block_bytes = kv_bytes_per_token(loaded.layers, kv_type) * config.block_tokens
    num_blocks = config.num_blocks
    if not num_blocks:
        peak = _peak_bytes(forward, _prefill_tokens(config), max_rows, loaded.vocab_size, device)
        if config.cuda_graphs and forward.fused:
            largest = stretched_tokens(interleaved_tokens(config), _prefill_tokens(config)) + max_rows
            peak += _peak_bytes(forward, largest, 1, loaded.vocab_size, device)
            peak += _GRAPH_BYTES * len(row_buckets(max_rows)) * len(token_buckets(largest - max_rows))
        context_tokens = min(loaded.max_context_tokens, config.max_context_tokens or loaded.max_context_tokens)
        useful = 1 + max_rows * -(-context_tokens // config.block_tokens)
        free = torch.cuda.mem_get_info(device)[0] // company.shares
        num_blocks = choose_num_blocks(free, peak, config.kv_memory_fraction, block_bytes, useful)
        num_blocks = company.least(num_blocks)
        on_progress(f"the largest step and the graphs need {peak / 2**30:.2f} GiB, {free / 2**30:.1f} GiB are free")
    tokens = (num_blocks - 1) * config.block_tokens
    size = f"{num_blocks * block_bytes / 2**30:.1f} GiB"
    on_progress(f"KV cache: {num_blocks} blocks, {tokens} tokens, {size} of {str(kv_type).removeprefix('torch.')}")
    return KvCache.allocate(loaded.layers, num_blocks, config.block_tokens, kv_type, device)


def _peak_bytes(forward: DeviceForward, tokens: int, rows: int, vocab_size: int, device: torch.device) -> int:
    """What a prefill of `tokens` with `rows` rows of logits needs at its peak."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    _trial_prefill(forward, tokens, rows, vocab_size, device)
    peak = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return peak


def _trial_prefill(forward: DeviceForward, tokens: int, max_rows: int, vocab_size: int, device: torch.device) -> None:
    """A prefill of one sequence whose blocks are all the null block, and its logits as the sampler would widen them."""
    ids = torch.arange(tokens, device=device) % vocab_size
    positions = torch.zeros_like(ids)
    lens = torch.tensor([tokens], dtype=torch.int32, device=device)
    batch = AttentionBatch(
        slot_mapping=positions,
        block_tables=torch.zeros((1, tokens), dtype=torch.int32, device=device),
        context_lens=lens,
        query_starts=torch.tensor([0, tokens], dtype=torch.int32, device=device),
        max_query_tokens=tokens,
        max_context_tokens=tokens,
        decode=False,
        slots=torch.zeros_like(lens, dtype=torch.int64),
    )
    logits = forward.prefill(ids, positions, positions[: min(max_rows, tokens)], batch).float()
    scratch = [torch.empty_like(logits) for _ in range(6)]  # what filtered sampling holds at its peak
    del scratch, logits


def interleaved_tokens(config: EngineConfig) -> int:
    """Prompt tokens of a step beside running sequences."""
    return min(_prefill_tokens(config), config.interleaved_prefill_tokens or DEFAULT_INTERLEAVED_TOKENS)


def _prefill_tokens(config: EngineConfig) -> int:
    return config.prefill_tokens_per_step or DEFAULT_PREFILL_TOKENS
