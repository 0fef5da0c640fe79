"""One engine on several devices: every rank's part loaded, the parts joined, and the runner that steps them together.

Runs in the loading thread; what ranks must do at once runs on a thread each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from transformers import PreTrainedModel

from ...config import EngineConfig
from ...contracts.errors import ConfigError
from ...telemetry.step_meter import StepMeter
from ..model.joined import join
from ..model.loader import LoadedModel, inspected, load_weights
from ..model.support import UnsupportedModel
from ..parallel.interface import LOADING_PATIENCE_S, Exchange, RanksFailed, Sizes
from ..parallel.registry import make_exchanges, make_ranks
from ..step import Runner
from .pass_size import MAX_CHUNKS
from .rank_threads import RankThreads

DEFAULT_ROWS = 256
DEFAULT_TOKENS = 8192


def build_ranks(
    model: Path,
    config: EngineConfig,
    devices: Sequence[torch.device],
    on_progress: Callable[[str], None],
    meter: StepMeter | None = None,
    on_broken: Callable[[str], None] = lambda reason: None,
) -> Runner:
    """`on_broken` is told once why no step can run any more. Raises ConfigError with the reason."""
    try:
        parts, ranks = load_ranks(model, config, devices, on_progress)
        runner: Runner
        if devices[0].type == "cpu":
            from .cpu_ranks import CpuRanks

            runner = CpuRanks(parts, ranks, config, meter)
        else:
            from .cuda_ranks import CudaRanks

            runner = CudaRanks(parts, ranks, config, on_progress, meter)
        ranks.require()
    except RanksFailed as error:
        raise ConfigError(f"engine.device: given {config.device}, but {error}") from error
    ranks.on_broken = on_broken
    return runner


def load_ranks(
    path: Path, config: EngineConfig, devices: Sequence[torch.device], on_progress: Callable[[str], None]
) -> tuple[list[LoadedModel], RankThreads]:
    """The parts, joined. They wait as long for each other as loading takes. Raises ConfigError and RanksFailed."""
    loaded = []
    for rank in make_ranks(devices):
        on_progress(f"rank {rank.index} of {rank.count}, on {rank.device}")
        loaded.append(load_weights(path, config, rank.device, on_progress, rank))
    models, shares = [model for model, _ in loaded], [share for _, share in loaded if share is not None]
    text = models[0].config.get_text_config()
    rows = config.max_sequences or DEFAULT_ROWS
    tokens = config.prefill_tokens_per_step or DEFAULT_TOKENS
    sizes = Sizes(tokens * 9 // 8 + rows, text.hidden_size, rows + MAX_CHUNKS, text.vocab_size, models[0].dtype)
    try:
        exchanges = make_exchanges([share.rank for share in shares], sizes)
    except ValueError as error:
        raise ConfigError(f"engine.device: given {config.device}, but {error}") from error
    for model, share, exchange in zip(models, shares, exchanges, strict=True):
        join(model, share, exchange)
    ranks = RankThreads(exchanges)
    if devices[0].type == "cuda":
        ranks.each(lambda rank: _rehearse(models[rank], exchanges[rank]))
    ranks.each(lambda rank: exchanges[rank].patience(LOADING_PATIENCE_S))
    silent: Callable[[str], None] = lambda _: None  # noqa: E731  (what one rank says, all would)
    return ranks.each(lambda rank: inspected(models[rank], silent if rank else on_progress)), ranks


def _rehearse(model: PreTrainedModel, exchange: Exchange) -> None:
    """What the model's own code needs on this thread is loaded before a kernel waits for another rank: it could keep
    that rank's host from loading. Sums over one rank mean nothing."""
    exchange.patience(0)
    with suppress(UnsupportedModel):
        inspected(model, lambda _: None)
    torch.cuda.synchronize()
