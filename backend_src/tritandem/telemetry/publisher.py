"""Carries what a registry gathered to wherever metrics are shown, at a fixed pace, on its own thread.

Owns the thread and the pace. Knows nothing about Triton: a `MetricSink` does. Every period it also reads the
CPU state of this process, so that each component reports its own share.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from .families import CORES_ALLOWED, CPU_PRESSURE, CPU_THROTTLED, PROCESS_CPU, RESIDENT_BYTES, RUN_QUEUE_WAIT
from .pressure import read_cpu
from .registry import Change, Registry

_log = logging.getLogger(__name__)


class MetricSink(Protocol):
    """Where changes go; may block for a process message per change."""

    def publish(self, changes: Sequence[Change]) -> None: ...

    def close(self) -> None:
        """Nothing is published afterwards."""


class DiscardingSink:
    """For a server whose metrics are switched off."""

    def publish(self, changes: Sequence[Change]) -> None:
        del changes

    def close(self) -> None: ...


class Publisher:
    """Publishes `registry` every `period_s` seconds until `close`, which publishes once more.

    `before` callbacks run first in each period: gauges that are read rather than observed belong there.
    `machine_wide` lets exactly one component of a server report the machine's pressure and throttling.
    """

    def __init__(
        self,
        registry: Registry,
        sink: MetricSink,
        component: str,
        period_s: float = 2.0,
        before: Sequence[Callable[[], None]] = (),
        machine_wide: bool = False,
    ) -> None:
        self._registry, self._sink, self._component = registry, sink, component
        self._period_s, self._before, self._machine_wide = period_s, tuple(before), machine_wide
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics-publisher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Publish what is left and end the thread; no message is sent after this returned."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._sink.close()

    def publish_once(self) -> None:
        """One period's work, on the calling thread."""
        for callback in self._before:
            callback()
        self._read_process()
        self._sink.publish(self._registry.changes())

    def _run(self) -> None:
        while True:
            last = self._stopping.wait(self._period_s)
            try:
                self.publish_once()
            except Exception:
                _log.exception("metrics could not be published; trying again in %.0f s", self._period_s)
            if last:
                return

    def _read_process(self) -> None:
        cpu = read_cpu()
        self._registry.add_up_to(PROCESS_CPU, cpu.process_cpu_s, component=self._component)
        self._registry.set(RESIDENT_BYTES, float(cpu.resident_bytes), component=self._component)
        self._registry.set(CORES_ALLOWED, float(cpu.cores_allowed), component=self._component)
        if cpu.run_queue_wait_s is not None:
            self._registry.add_up_to(RUN_QUEUE_WAIT, cpu.run_queue_wait_s, component=self._component)
        if self._machine_wide and cpu.pressure_s is not None:
            self._registry.add_up_to(CPU_PRESSURE, cpu.pressure_s)
        if self._machine_wide and cpu.throttled_s is not None:
            self._registry.add_up_to(CPU_THROTTLED, cpu.throttled_s)
