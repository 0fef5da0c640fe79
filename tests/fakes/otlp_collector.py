"""An OpenTelemetry collector's trace endpoint: OTLP over HTTP, decoded with OpenTelemetry's own messages."""

from __future__ import annotations

import queue
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Received:
    """One span as the wire had it; ids in hex, `parent` is "" for a root."""

    name: str
    trace_id: str
    span_id: str
    parent: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float]
    error: str
    resource: dict[str, str | int | float]


class OtlpCollector:
    """`with OtlpCollector() as collector: ... collector.url ... collector.spans(6)`; takes protobuf bodies only."""

    def __init__(self, port: int = 0) -> None:
        self._spans: queue.Queue[Received] = queue.Queue()
        received = self._spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                assert self.headers["Content-Type"] == "application/x-protobuf"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                for span in decode(body):
                    received.put(span)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._thread = Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"

    def spans(self, count: int, timeout_s: float = 30.0) -> list[Received]:
        """The next `count` spans; raises queue.Empty when they do not come."""
        return [self._spans.get(timeout=timeout_s) for _ in range(count)]

    def is_empty(self) -> bool:
        return self._spans.empty()

    def __enter__(self) -> OtlpCollector:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def decode(body: bytes) -> list[Received]:
    message = ExportTraceServiceRequest.FromString(body)
    return [
        Received(
            name=span.name,
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent=span.parent_span_id.hex(),
            start_ns=span.start_time_unix_nano,
            end_ns=span.end_time_unix_nano,
            attributes=_plain(span.attributes),
            error=span.status.message if span.status.code == 2 else "",
            resource=_plain(resource.resource.attributes),
        )
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _plain(pairs: Any) -> dict[str, str | int | float]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
