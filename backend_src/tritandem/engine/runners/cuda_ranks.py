"""The runner over several CUDA devices that hold a part of one model each: one thread steps them all.

Knows nothing about how a step gets to them. When they are no longer together, no result counts any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...config import EngineConfig
from ...telemetry.step_meter import StepMeter
from ..model.loader import LoadedModel
from ..parallel.interface import RanksFailed
from ..step import StepPlan, StepResult
from .cuda import CudaRunner
from .rank_devices import RankDevices
from .rank_threads import RankThreads


class CudaRanks(CudaRunner):
    """`Runner`. Raises ConfigError as `CudaRunner` does."""

    def __init__(
        self,
        parts: Sequence[LoadedModel],
        ranks: RankThreads,
        config: EngineConfig,
        on_progress: Callable[[str], None],
        meter: StepMeter | None = None,
    ) -> None:
        self._ranks = ranks

        def devices(_: LoadedModel, config: EngineConfig, on_progress: Callable[[str], None]) -> RankDevices:
            note = meter.launch_skew.note if meter is not None else None
            return RankDevices(parts, ranks, config, on_progress, note)

        super().__init__(parts[0], config, on_progress, meter, devices)

    def launch(self, plan: StepPlan) -> None:
        self._require()
        try:
            super().launch(plan)
        except Exception:
            self._require()
            raise

    def collect(self, wait: bool) -> StepResult | None:
        try:
            result = super().collect(wait)
        except Exception:
            self._require()
            raise
        self._require()
        return result

    def prepare(self) -> bool:
        self._require()
        return super().prepare()

    def _require(self) -> None:
        """Raises RanksFailed; what was launched is given up with it."""
        try:
            self._ranks.require()
        except RanksFailed:
            self._in_flight.clear()
            self._read.clear()
            raise
