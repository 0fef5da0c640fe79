"""OpenTelemetry's SDK, set up to send spans over OTLP/HTTP; the only importer of its packages.

The address comes from `[telemetry]`, everything else from OpenTelemetry's own variables: OTEL_SERVICE_NAME,
OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS, OTEL_BSP_SCHEDULE_DELAY and so on. Spans
leave on the SDK's own thread, in batches; when the collector is slow or away they are dropped there, and nothing waits.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..contracts.errors import ConfigError

SERVICE_NAME = "tritandem"
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
CLOSE_MS = 3000

Attributes = Mapping[str, str | int | float | bool]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that has ended; times are Unix ns. `error`: why it did not go well."""

    name: str
    start_ns: int
    end_ns: int
    attributes: Attributes = field(default_factory=dict)
    error: str = ""
    children: Sequence[Span] = ()


def refuse_missing_packages(traces_url: str) -> None:
    """Raises ConfigError when spans are asked for and cannot be sent."""
    if traces_url and not all(_importable(name) for name in PACKAGES):
        raise ConfigError(
            f"telemetry.traces_url: given {traces_url!r}, allowed: nothing without the packages of OpenTelemetry "
            "(pip install 'tritandem[tracing]')"
        )


class SpanExporter:
    """Sends spans to the collector at `traces_url` until `close`, which waits a little for what is left."""

    def __init__(self, traces_url: str) -> None:
        refuse_missing_packages(traces_url)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": SERVICE_NAME}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._sender = OTLPSpanExporter(endpoint=traces_url)
        self._provider.add_span_processor(BatchSpanProcessor(self._sender))
        self._tracer = self._provider.get_tracer(SERVICE_NAME)

    def export(self, span: Span, trace_parent: str) -> None:
        """`span` with all below it. It continues the W3C `trace_parent`; "" begins a trace of its own."""
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {"traceparent": trace_parent} if trace_parent else {}
        context = TraceContextTextMapPropagator().extract(carrier)
        self._emit(span, context, trace.SpanKind.SERVER)

    def close(self) -> None:
        # On a thread, because the SDK heeds no limit while it tries a collector that is away again and again.
        ending = threading.Thread(target=self._send_rest, daemon=True)
        ending.start()
        ending.join(CLOSE_MS / 1000)
        if ending.is_alive():
            self._sender.shutdown()  # ends the wait before the next try
            ending.join(CLOSE_MS / 1000)

    def _send_rest(self) -> None:
        self._provider.force_flush()
        self._provider.shutdown()

    def _emit(self, span: Span, context: Any, kind: Any) -> None:
        from opentelemetry import trace

        made = self._tracer.start_span(
            span.name, context=context, kind=kind, attributes=dict(span.attributes), start_time=span.start_ns
        )
        if span.error:
            made.set_status(trace.Status(trace.StatusCode.ERROR, span.error))
        inside = trace.set_span_in_context(made, context)
        for child in span.children:
            self._emit(child, inside, trace.SpanKind.INTERNAL)
        made.end(span.end_ns)


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
