"""Several CPU runners that hold a part of one model each and run every step together: the slow twin of ranks on GPUs.

For tests and trials. Knows nothing about what a step holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...config import EngineConfig
from ...telemetry.step_meter import StepMeter
from ..model.loader import LoadedModel
from ..step import StepPlan, StepResult
from .cpu import CpuRunner
from .rank_threads import RankThreads


class CpuRanks:
    """`Runner`; its threads are `ranks`, which are ended with it."""

    def __init__(
        self,
        parts: Sequence[LoadedModel],
        ranks: RankThreads,
        config: EngineConfig,
        meter: StepMeter | None = None,
    ) -> None:
        self._ranks = ranks
        first = CpuRunner(parts[0], config, meter)
        # What the host says about structures it says to all of them.
        others = [CpuRunner(part, config, masks=first.masks) for part in parts[1:]]
        self._runners = [first, *others]
        self.spec, self.masks = first.spec, first.masks
        for exchange in ranks.exchanges:
            exchange.patience(config.rank_patience_s)

    def launch(self, plan: StepPlan) -> None:
        self._ranks.require()
        try:
            self._ranks.each(lambda rank: self._runners[rank].launch(plan))
        except Exception:  # the others wait in the middle of a step, which cannot be taken back
            for runner in self._runners:
                runner.close()
            self._ranks.require()
            raise

    def masks_ready(self, step_id: int) -> None:
        """Nothing waits: a step is launched behind none."""

    def collect(self, wait: bool) -> StepResult | None:
        results = [runner.collect(wait) for runner in self._runners]
        return results[0]

    def pending(self) -> int:
        return self._runners[0].pending()

    def busy(self) -> bool:
        return False

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        for runner in self._runners:
            runner.close()
        self._ranks.close()
