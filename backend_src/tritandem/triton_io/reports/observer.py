"""What the scheduler's process reports, turned into metrics and into one log line per finished request.

Owns the lines not yet written and the times of detokenizing and sending. `finished` and `gauges` run on the
scheduler's threads and only update the registry; `report` and `write_log` run on the publisher's thread. Implements
`scheduler.ports.Observer`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable

from ...contracts.answers import Stamps
from ...contracts.errors import Outcome
from ...contracts.printable import escaped
from ...contracts.requests import PriorityClass
from ...scheduler.ports import FinishedRequest, SchedulerSnapshot
from ...telemetry import families as f
from ...telemetry.duration_counts import LockedDurationCounts
from ...telemetry.registry import Registry
from .request_spans import RequestSpans

MAX_UNWRITTEN_LINES = 10_000


class RequestObserver:
    """`write_line` takes one JSON document per finished request; None writes no log. `spans`, if any, hears of each."""

    def __init__(
        self, registry: Registry, write_line: Callable[[str], None] | None, spans: RequestSpans | None = None
    ) -> None:
        self._registry = registry
        self._write_line = write_line
        self._spans = spans
        self._unwritten: deque[FinishedRequest] = deque(maxlen=MAX_UNWRITTEN_LINES)
        self.detokenize = LockedDurationCounts(f.DETOKENIZE)
        self.send = LockedDurationCounts(f.SEND)
        self.gap = LockedDurationCounts(f.RESPONSE_GAP)
        # A counter that appears with its first increment hides that increment from every rate.
        for outcome in Outcome:
            for priority in PriorityClass:
                registry.add(f.REQUESTS, 0, outcome=outcome.value, priority=priority.name.lower())
        for family in (f.PROMPT_TOKENS, f.OUTPUT_TOKENS):
            registry.add(family, 0)
        for gauge in (f.REQUESTS_RUNNING, f.REQUESTS_WAITING, f.UNSENT_CHARACTERS):
            registry.set(gauge, 0)

    def finished(self, record: FinishedRequest) -> None:
        registry, stamps, priority = self._registry, record.stamps, record.priority.name.lower()
        registry.add(f.REQUESTS, outcome=record.outcome.value, priority=priority)
        registry.add(f.PROMPT_TOKENS, record.num_input_tokens)
        registry.add(f.OUTPUT_TOKENS, record.num_output_tokens)
        for family, seconds in durations(stamps, record.num_output_tokens).items():
            if family.labels:
                registry.observe(family, seconds, priority=priority)
            else:
                registry.observe(family, seconds)
        if record.num_responses:
            registry.observe(f.RESPONSE_TOKENS, record.num_output_tokens / record.num_responses)
        if record.longest_pause_ns:
            registry.observe(f.LONGEST_PAUSE, record.longest_pause_ns / 1e9)
        if self._write_line is not None:
            self._unwritten.append(record)
        if self._spans is not None:
            self._spans.note(record)

    def gauges(self, snapshot: SchedulerSnapshot) -> None:
        registry = self._registry
        registry.set(f.REQUESTS_RUNNING, snapshot.running)
        registry.set(f.REQUESTS_WAITING, sum(snapshot.waiting.values()))
        registry.set(f.UNSENT_CHARACTERS, snapshot.buffered_chars)
        for engine in snapshot.engines:
            load, name = engine.load, engine.name
            registry.set(f.SEQUENCE_LIMIT, engine.limits.sequences, engine=name)
            registry.set(f.ENGINE_UP, float(engine.health == "up"), engine=name)
            registry.set(f.ENGINE_RUNNING, load.running, engine=name)
            registry.set(f.ENGINE_WAITING, load.waiting, engine=name)
            registry.set(f.KV_BLOCKS_FREE, load.free_blocks, engine=name)
            registry.set(f.KV_BLOCKS_USED, load.total_blocks - load.free_blocks, engine=name)
            registry.set(f.DECODE_STEP_AVERAGE, load.decode_step_ns / 1e9, engine=name)
            registry.add_up_to(f.PREFIX_QUERY_TOKENS, load.prompt_tokens, engine=name)
            registry.add_up_to(f.PREFIX_HIT_TOKENS, load.prefix_hit_tokens, engine=name)
            registry.add_up_to(f.PREEMPTIONS, load.preemptions, engine=name)
            registry.add_up_to(f.ENGINE_STEPS, load.steps, engine=name)

    def report(self) -> None:
        """Carry over what was timed since the last call."""
        for histogram in (self.detokenize, self.send, self.gap):
            counts, total_s = histogram.totals()
            self._registry.histogram_up_to(histogram.family, counts, total_s)

    def write_log(self) -> None:
        """Write the lines of the requests that finished since the last call."""
        while self._write_line is not None and self._unwritten:
            self._write_line(log_line(self._unwritten.popleft(), time.time_ns() - time.monotonic_ns()))


def durations(stamps: Stamps, num_output_tokens: int) -> dict[f.Family, float]:
    """Seconds of each stage that the request reached both ends of."""
    stages = {
        f.TOKENIZE: (stamps.received_ns, stamps.tokenized_ns),
        f.QUEUE_WAIT: (stamps.tokenized_ns, stamps.dispatched_ns),
        f.PREFILL: (stamps.prefill_start_ns, stamps.first_token_ns),
        f.TIME_TO_FIRST_TOKEN: (stamps.received_ns, stamps.first_sent_ns),
        f.REQUEST_LATENCY: (stamps.received_ns, stamps.finished_ns),
    }
    seconds = {family: (end - start) / 1e9 for family, (start, end) in stages.items() if 0 < start <= end}
    if num_output_tokens > 1 and 0 < stamps.first_token_ns <= stamps.last_token_ns:
        gap_ns = (stamps.last_token_ns - stamps.first_token_ns) / (num_output_tokens - 1)
        seconds[f.INTER_TOKEN_LATENCY] = gap_ns / 1e9
    return seconds


def log_line(record: FinishedRequest, clock_offset_ns: int) -> str:
    """One JSON document: identity, outcome, counts, the arrival in Unix seconds (`clock_offset_ns` after the monotonic
    stamps) and every later stamp in ms after it (null: not reached)."""
    stamps = record.stamps
    after_ms = {
        name.removesuffix("_ns") + "_ms": round((value - stamps.received_ns) / 1e6, 3) if value else None
        for name in Stamps.__dataclass_fields__
        if name != "received_ns"
        for value in (getattr(stamps, name),)
    }
    line = {
        "event": "request",
        "id": record.request_id,
        "received_unix_s": round((stamps.received_ns + clock_offset_ns) / 1e9, 6),
        "outcome": record.outcome.value,
        "priority": record.priority.name.lower(),
        "tenant": record.tenant,
        "engine": record.engine,
        "prompt_tokens": record.num_input_tokens,
        "cached_tokens": record.cached_tokens,
        "output_tokens": record.num_output_tokens,
        "responses": record.num_responses,
        "longest_pause_ms": round(record.longest_pause_ns / 1e6, 3),
        **after_ms,
    }
    if record.seed is not None:
        line["seed"] = record.seed
    if record.trace_parent:
        line["trace_id"] = record.trace_parent.split("-")[1]
    if record.error:
        line["error"] = record.error
    return escaped(json.dumps(line, ensure_ascii=False))
