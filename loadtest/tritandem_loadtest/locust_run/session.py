"""One process's share of a run: hands arrivals to users at their time, sends them, and writes the raw records.

Owns the schedule, the transport and the record file of this process. Runs in gevent greenlets; knows nothing about
Locust's classes and computes no figure.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path

import gevent
from gevent.event import Event

from .. import arrivals, stamps
from ..arrivals import Arrival
from ..config import RunConfig
from ..stamps import ProcessRecord, RequestRecord
from ..transport.connect import connect
from ..transport.interface import Transport
from ..workload import Workload

# Timers of the event loop have a granularity of a millisecond: the rest is waited out by yielding.
_TIMER_SLACK_S = 0.001
_UNREACHABLE_PAUSE_S = 0.1


class LoadSession:
    """`on_record` is called in the user's greenlet after each request; `out` receives one JSON line for each."""

    def __init__(
        self,
        config: RunConfig,
        shard: int,
        shards: int,
        out: Path | None,
        on_record: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self.config = config
        self._workload = Workload(config)
        self._transport: Transport = connect(config)
        self._transport.open()
        self._arrivals: Iterator[Arrival] = arrivals.schedule(config, shard, shards)
        self._on_record = on_record
        self._file = out.open("w", encoding="utf-8") if out else None
        self._closed_loop = config.arrival == "closed"
        self._exhausted = False
        self._process = ProcessRecord(shard, 0, 0, users=max(1, config.user_count // shards))
        self.start_ns = 0
        self.failure = ""  # why the load generator itself cannot go on
        self._started = Event()
        self._stopping = Event()
        self.taken = self.sent = self.done = self.failed = self.tokens = 0
        self._sampler: gevent.Greenlet | None = None

    @property
    def finished(self) -> bool:
        """True when the schedule is used up and every request has ended."""
        return self._exhausted and self.taken == self.done

    def start(self, start_ns: int) -> None:
        """Offset 0 of the schedule is `start_ns` on the monotonic clock, now or soon."""
        self.start_ns = self._process.start_ns = start_ns
        self._sampler = gevent.spawn(self._sample_cpu)
        self._started.set()

    def stop(self) -> None:
        """Send nothing more: users that wait for their time give up at once, requests in flight go on."""
        self._exhausted = True
        self._stopping.set()
        self._started.set()

    def wait_for_stop(self) -> None:
        """Until `stop`: for users without an arrival."""
        self._stopping.wait()

    def run_next(self) -> RequestRecord | None:
        """Take the next arrival, wait for its time and send it; None when there is none left.

        The prompt is made before the wait, for the first arrivals even before the start.
        """
        arrival = self._take()
        if arrival is None:
            return None
        call = self._workload.call(arrival)
        self._started.wait()
        due_ns = self.start_ns + round(arrival.at_s * 1e9)
        intended_ns = time.monotonic_ns() if self._closed_loop else due_ns
        wait_until(intended_ns, self._stopping)
        if self._stopping.is_set():
            return None
        self.sent += 1
        exchange = self._transport.exchange(call, self.config.timeout_s)
        decoded = self._transport.decode(exchange)
        record = RequestRecord(
            index=arrival.index,
            intended_ns=intended_ns,
            sent_ns=exchange.sent_ns,
            end_ns=exchange.end_ns,
            arrived_ns=decoded.arrived_ns,
            tokens=decoded.tokens,
            input_tokens=decoded.input_tokens,
            cached_tokens=decoded.cached_tokens,
            input_words=call.prompt.count(" ") + 1,
            server=decoded.server,
        )
        if exchange.outcome:
            record.outcome, record.error = exchange.outcome, exchange.error
        elif decoded.error:
            record.outcome, record.error = stamps.outcome_of(decoded.error), decoded.error
        elif not decoded.tokens:
            record.outcome, record.error = stamps.INCOMPLETE, "the stream ended without a token"
        self._keep(record)
        if self._closed_loop and record.outcome == stamps.UNREACHABLE:
            self._stopping.wait(_UNREACHABLE_PAUSE_S)  # nothing holds a closed loop back when nobody answers
        return record

    def close(self) -> None:
        """Write this process's own record and close connections.

        Requests still in flight, and arrivals that are due but were never taken, count as unsent.
        """
        if self._sampler is not None:
            self._sampler.kill()
        now_ns = self._process.end_ns = time.monotonic_ns()
        if not self._closed_loop:
            due = takewhile(lambda a: self.start_ns + a.at_s * 1e9 < now_ns, self._arrivals)
            self._process.unsent = self.sent - self.done + sum(1 for _ in due)
        self._write(self._process)
        if self._file is not None:
            self._file.close()
        self._transport.close()

    def _take(self) -> Arrival | None:
        end_ns = self.start_ns + self.config.duration_s * 1e9
        ended = self._closed_loop and self._started.is_set() and time.monotonic_ns() >= end_ns
        arrival = None if ended or self._exhausted else next(self._arrivals, None)
        if arrival is None:
            self._exhausted = True
        else:
            self.taken += 1
        return arrival

    def _keep(self, record: RequestRecord) -> None:
        self.done += 1
        self.failed += record.outcome != stamps.COMPLETED
        self.tokens += record.output_tokens
        self._write(record)
        self._on_record(record)

    def _write(self, record: RequestRecord | ProcessRecord) -> None:
        if self._file is not None:
            self._file.write(stamps.as_line(record))

    def _sample_cpu(self) -> None:
        wait_until(self.start_ns, self._stopping)
        wall_ns, cpu_s = time.monotonic_ns(), time.process_time()
        while True:
            gevent.sleep(1.0)
            now_ns, now_cpu_s = time.monotonic_ns(), time.process_time()
            self._process.cpu_percent.append(round(100e9 * (now_cpu_s - cpu_s) / (now_ns - wall_ns), 1))
            wall_ns, cpu_s = now_ns, now_cpu_s


def wait_until(when_ns: int, interrupt: Event) -> None:
    """Wait in the event loop, the last millisecond by yielding to it; returns early when `interrupt` is set."""
    left_s = (when_ns - time.monotonic_ns()) / 1e9
    if left_s > _TIMER_SLACK_S:
        interrupt.wait(left_s - _TIMER_SLACK_S)
    while time.monotonic_ns() < when_ns and not interrupt.is_set():
        gevent.sleep(0)
