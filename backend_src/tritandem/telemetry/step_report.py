"""What an engine's step meter counted, into a registry. Runs on a publisher's thread."""

from __future__ import annotations

from .families import GRAPH_LAUNCH, STAGING_BYTES
from .registry import Registry
from .step_meter import StepMeter


class StepReport:
    """Call it once a period. `launches`: whether a launch is something else than the step itself (not on a CPU)."""

    def __init__(self, registry: Registry, meter: StepMeter, launches: bool) -> None:
        self._registry, self._meter = registry, meter
        self._histograms = [h for h in meter.histograms() if launches or h.family is not GRAPH_LAUNCH]

    def __call__(self) -> None:
        for histogram in self._histograms:
            counts, total_s = histogram.totals()
            self._registry.histogram_up_to(histogram.family, counts, total_s, **histogram.labels)
        for kind, total in self._meter.staged_bytes().items():
            self._registry.add_up_to(STAGING_BYTES, float(total), engine=self._meter.engine, kind=kind)
