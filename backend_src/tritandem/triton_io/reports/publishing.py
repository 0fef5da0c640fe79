"""What each kind of process publishes: its registry, its reports and where they go.

The only place that knows which series belong to which process. `Publisher.start` may be called while the model
initialises; `Publisher.close` in `finalize`, when nothing else of the process calls into Triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ...config import TelemetryConfig
from ...machine.connections import ConnectionWatch
from ...machine.processes import cores_of
from ...telemetry.budgeted import Budgeted
from ...telemetry.families import CLIENTS_STALLED, SERVER_CORES, UNSENT_BYTES
from ...telemetry.gpu_report import GpuReport
from ...telemetry.process_report import MachineReport, ProcessReport
from ...telemetry.publisher import DiscardingSink, Publisher
from ...telemetry.registry import Registry
from ...telemetry.step_meter import StepMeter
from ...telemetry.step_report import StepReport
from .metric_sink import TritonMetricSink
from .observer import RequestObserver
from .request_spans import RequestSpans
from .tokenizer_report import TokenizerReport

SERVER_SHARE = 0.001  # of a core, for each look at tritonserver's process, which has hundreds of threads
METRICS_PORT = 8002  # Triton's own default
Report = Callable[[], None]


def tokenizer_publisher(config: TelemetryConfig, report: TokenizerReport, registry: Registry, name: str) -> Publisher:
    """`name`: Triton's of this instance of the tokenizer, which may be one of several."""
    return _publisher(config, registry, [report, ProcessReport(registry, "tokenizer", name)])


def engine_publisher(config: TelemetryConfig, meter: StepMeter) -> Publisher:
    """For an engine that has been built: it has told `meter` what it runs on."""
    registry = Registry()
    reports: list[Report] = [
        StepReport(registry, meter, launches=bool(meter.gpu_uuid)),
        ProcessReport(registry, "engine", meter.engine),
    ]
    if meter.gpu_uuid:
        reports.append(GpuReport(registry, meter.engine, meter.gpu_uuid))
    return _publisher(config, registry, reports)


def scheduler_publisher(
    config: TelemetryConfig, observer: RequestObserver, registry: Registry, spans: RequestSpans | None
) -> Publisher:
    """Besides its own series those of the machine, of tritonserver's process and of the clients' connections."""
    machine: list[Report] = [
        observer.report,
        ProcessReport(registry, "scheduler", "scheduler"),
        MachineReport(registry),
        *_server_reports(registry),
    ]
    # Log and spans are written whether or not anybody asks for metrics.
    always = [observer.write_log, *([spans.export] if spans else [])]
    return _publisher(config, registry, machine, always, [spans.close] if spans else [])


def _publisher(
    config: TelemetryConfig,
    registry: Registry,
    reports: Sequence[Report],
    always: Sequence[Report] = (),
    closing: Sequence[Report] = (),
) -> Publisher:
    if not config.metrics:
        return Publisher(registry, DiscardingSink(), config.metrics_period_s, always, closing)
    return Publisher(registry, TritonMetricSink(), config.metrics_period_s, [*always, *reports], closing)


def _server_reports(registry: Registry) -> list[Report]:
    """tritonserver started this process. Anywhere else, as in a test, there is nothing to tell about the parent."""
    server = os.getppid()
    if "triton" not in Path(f"/proc/{server}/comm").read_text():
        return []
    # Who reads the metrics is no client: a scrape that takes its time is not a stalled answer.
    connections = ConnectionWatch(server, besides=(metrics_port(Path(f"/proc/{server}/cmdline").read_text()),))

    def report_cores() -> None:
        cores = cores_of(server)
        if cores is not None:
            registry.set(SERVER_CORES, cores)

    def report_connections() -> None:
        found = connections.read()
        if found is not None:
            registry.set(CLIENTS_STALLED, found.stalled)
            registry.set(UNSENT_BYTES, found.unsent_bytes)

    return [
        Budgeted(ProcessReport(registry, "server", "tritonserver", server), SERVER_SHARE),
        Budgeted(report_cores, SERVER_SHARE / 10),
        Budgeted(report_connections, SERVER_SHARE),
    ]


def metrics_port(command_line: str) -> int:
    """Of a tritonserver, whose words NUL separates: the last one that names it counts."""
    flag = "--metrics-port="
    ports = [word[len(flag) :] for word in command_line.split("\0") if word.startswith(flag)]
    return int(ports[-1]) if ports and ports[-1].isdecimal() else METRICS_PORT
