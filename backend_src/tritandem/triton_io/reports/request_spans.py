"""A finished request as spans: tokenize, queue, prefill, decode and send below one for the whole.

Made of the request's stamps, after its last response and on the publisher's thread: tracing costs a request in flight
nothing, and a token even less.
"""

from __future__ import annotations

import time
from collections import deque

from ...contracts.answers import Stamps
from ...contracts.errors import Outcome
from ...scheduler.ports import FinishedRequest
from ...telemetry.tracing import Span, SpanExporter

MAX_UNSENT = 10_000
WELL = frozenset({Outcome.COMPLETED, Outcome.STOPPED})
# Span name: the stamps it lies between.
STAGES = (
    ("tokenize", "received_ns", "tokenized_ns"),
    ("queue", "tokenized_ns", "dispatched_ns"),
    ("prefill", "prefill_start_ns", "first_token_ns"),
    ("decode", "first_token_ns", "last_token_ns"),
    ("send", "last_token_ns", "finished_ns"),
)


class RequestSpans:
    """`note` may be called from any thread; `export` and `close` belong to the publisher's."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._unsent: deque[FinishedRequest] = deque(maxlen=MAX_UNSENT)

    def note(self, record: FinishedRequest) -> None:
        self._unsent.append(record)

    def export(self) -> None:
        """Of the requests that finished since the last call."""
        # Stamps are of a clock that only knows this machine's uptime; collectors want the wall's.
        unix_minus_monotonic_ns = time.time_ns() - time.monotonic_ns()
        while self._unsent:
            record = self._unsent.popleft()
            self._exporter.export(request_span(record, unix_minus_monotonic_ns), record.trace_parent)

    def close(self) -> None:
        self.export()
        self._exporter.close()


def request_span(record: FinishedRequest, clock_offset_ns: int) -> Span:
    """Attributes follow OpenTelemetry's names for generative models where there is one."""
    stamps = record.stamps
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tritandem",
        "gen_ai.usage.input_tokens": record.num_input_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
        "tritandem.request_id": record.request_id,
        "tritandem.outcome": record.outcome.value,
        "tritandem.priority": record.priority.name.lower(),
        "tritandem.tenant": record.tenant,
        "tritandem.engine": record.engine,
        "tritandem.responses": record.num_responses,
    }
    if stamps.first_sent_ns:
        attributes["tritandem.time_to_first_token_s"] = (stamps.first_sent_ns - stamps.received_ns) / 1e9
    return Span(
        name="generate",
        start_ns=stamps.received_ns + clock_offset_ns,
        end_ns=stamps.finished_ns + clock_offset_ns,
        attributes=attributes,
        error="" if record.outcome in WELL else record.error or record.outcome.value,
        children=[Span(name, start + clock_offset_ns, end + clock_offset_ns) for name, start, end in stages(stamps)],
    )


def stages(stamps: Stamps) -> list[tuple[str, int, int]]:
    """(name, start, end) of each stage that the request reached both ends of."""
    ends = [(name, getattr(stamps, start), getattr(stamps, end)) for name, start, end in STAGES]
    return [(name, start, end) for name, start, end in ends if 0 < start <= end]
