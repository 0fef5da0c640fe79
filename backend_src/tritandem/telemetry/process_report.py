"""What one process uses of the CPU and how long it waits for it, and the same of the whole cgroup, into a registry.

Runs on a publisher's thread.
"""

from __future__ import annotations

import time

from ..machine.pressure import read_machine
from ..machine.processes import ProcessWatch
from .families import (
    CORES_ALLOWED,
    CPU_PRESSURE,
    CPU_THROTTLED,
    PROCESS_CPU,
    RESIDENT_BYTES,
    RUN_QUEUE_WAIT,
    TELEMETRY_CPU,
)
from .registry import Registry


class ProcessReport:
    """Call it once a period. `component` and `process` are the labels; this process unless `pid` names another."""

    def __init__(self, registry: Registry, component: str, process: str, pid: int | None = None) -> None:
        self._registry = registry
        self._labels = {"component": component, "process": process}
        self._publishes = pid is None
        self._watch = ProcessWatch(pid)

    def __call__(self) -> None:
        reading, registry = self._watch.read(), self._registry
        if self._publishes:
            registry.add_up_to(TELEMETRY_CPU, time.thread_time(), **self._labels)
        if reading.cpu_s is not None:
            registry.add_up_to(PROCESS_CPU, reading.cpu_s, **self._labels)
        if reading.run_queue_wait_s is not None:
            registry.add_up_to(RUN_QUEUE_WAIT, reading.run_queue_wait_s, **self._labels)
        if reading.resident_bytes is not None:
            registry.set(RESIDENT_BYTES, float(reading.resident_bytes), **self._labels)
        if reading.cores_allowed is not None:
            registry.set(CORES_ALLOWED, float(reading.cores_allowed), **self._labels)


class MachineReport:
    """Pressure and throttling, which all processes of a server share: exactly one of them reports it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __call__(self) -> None:
        reading = read_machine()
        if reading.pressure_s is not None:
            self._registry.add_up_to(CPU_PRESSURE, reading.pressure_s)
        if reading.throttled_s is not None:
            self._registry.add_up_to(CPU_THROTTLED, reading.throttled_s)
