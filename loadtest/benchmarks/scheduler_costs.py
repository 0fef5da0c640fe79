"""What the scheduler costs apart from delivery: the waiting queue, the way of one request, asking for cancellation.

No model and no Triton. Prints tables and, last, one JSON document.
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from tritandem.config import SchedulerConfig
from tritandem.contracts.answers import Chunk
from tritandem.contracts.arrays import Int32Array
from tritandem.contracts.errors import TritandemError
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest, GenerationRequest, PriorityClass
from tritandem.contracts.stream import FinishCode, LoadSnapshot, TokenBatch
from tritandem.scheduler import SchedulerService
from tritandem.scheduler.cancel_watch import CancelWatch
from tritandem.scheduler.policy.waiting import PolicyConfig, Waiting
from tritandem.scheduler.ticket import Ticket
from tritandem.scheduler.waiting_queue import WaitingQueue

S = 1_000_000_000


def queue_costs(waiting: int, tenants: int, rounds: int = 4000) -> dict[str, float]:
    """Steady state at `waiting` requests: one leaves in order, one arrives, 0.1 ms later; microseconds each."""
    rng = random.Random(0)
    waiting_queue: WaitingQueue[int] = WaitingQueue(PolicyConfig(ageing_ns=S // 2))
    now_ns = 0

    def entry(number: int) -> Waiting:
        deadline_ns = now_ns + rng.randrange(10 * S) if rng.random() < 0.2 else None
        tenant = str(rng.randrange(tenants))
        return Waiting(number, rng.choice(list(PriorityClass)), tenant, now_ns, deadline_ns, rng.randrange(1, 2000))

    for number in range(waiting):
        waiting_queue.push(entry(number), number, now_ns)
    push_s = pick_s = 0.0
    for number in range(waiting, waiting + rounds):
        now_ns += 100_000
        new, start_s = entry(number), time.perf_counter()
        waiting_queue.push(new, number, now_ns)
        push_s, start_s = push_s + time.perf_counter() - start_s, time.perf_counter()
        first = waiting_queue.peek(now_ns)
        assert first is not None
        waiting_queue.take(first)
        pick_s += time.perf_counter() - start_s
    return {
        "waiting": waiting,
        "tenants": tenants,
        "push_us": round(1e6 * push_s / rounds, 1),
        "pick_us": round(1e6 * pick_s / rounds, 1),
    }


class InstantEngine:
    """Answers every sequence with one token as soon as it is asked."""

    name = "instant"

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._load = LoadSnapshot(max_sequences=16, max_context_tokens=4096)

    def submit(self, requests: Sequence[EngineRequest]) -> list[TritandemError | None]:
        for request in requests:
            self._new.put(request.seq_id)
        return [None] * len(requests)

    def cancel(self, seq_ids: Sequence[int]) -> None:
        raise AssertionError(f"nothing cancels here, but {seq_ids} were")

    def load(self) -> LoadSnapshot:
        return self._load

    def stream(self) -> Iterator[TokenBatch]:
        while True:
            try:
                seq_id = self._new.get(timeout=0.5)
            except queue.Empty:
                return
            yield TokenBatch(
                seq_ids=np.array([seq_id]),
                token_counts=np.ones(1, dtype=np.int32),
                tokens=np.ones(1, dtype=np.int32),
                finish=np.full(1, int(FinishCode.LENGTH), dtype=np.uint8),
                cached_tokens=np.zeros(1, dtype=np.int32),
                stamps_ns=np.zeros((1, 4), dtype=np.int64),
                load=self._load,
            )


class LetterStep(NamedTuple):
    text: str
    stopped: bool
    tokens_used: int


class LetterText:
    """Every row reads `x`."""

    def open(self, prompt_ids: Int32Array, stop_words: tuple[str, ...]) -> None:
        return None

    def push(self, states: list[Any], tokens: Int32Array, counts: Int32Array) -> list[LetterStep]:
        return [LetterStep("x", False, 1)] * len(states)

    def flush(self, state: Any) -> str:
        return ""


class WaitingSink:
    """One response ends it; knows when."""

    def __init__(self) -> None:
        self.ended = threading.Event()

    def send(self, chunk: Chunk) -> None:
        raise AssertionError("text and end arrive together")

    def finish(self, chunk: Chunk) -> None:
        self.ended.set()

    def fail(self, error: TritandemError) -> None:
        raise error

    def cancelled(self) -> bool:
        return False


def idle_latency(tick_s: float, rounds: int = 500) -> dict[str, float]:
    """From `submit` to `finish` through all threads, one request at a time, with an engine that takes no time."""
    service = SchedulerService([InstantEngine()], LetterText(), SchedulerConfig(tick_s=tick_s))
    service.start()
    while not service.ready():
        time.sleep(0.01)
    ids, took_ms = np.array([1, 2], dtype=np.int32), []
    for i in range(rounds):
        sink, start_s = WaitingSink(), time.perf_counter()
        service.submit(GenerationRequest(str(i), ids, SamplingParams(max_tokens=1)), sink)
        sink.ended.wait()
        took_ms.append(1000 * (time.perf_counter() - start_s))
    service.close()
    took_ms.sort()
    return {
        "tick_ms": 1000 * tick_s,
        "submit_to_finish_ms_p50": round(took_ms[rounds // 2], 2),
        "submit_to_finish_ms_p99": round(took_ms[int(0.99 * rounds)], 2),
    }


class QuietSink:
    """A client that stays; one question takes `trip_s`, asleep."""

    def __init__(self, trip_s: float) -> None:
        self._trip_s = trip_s
        self.asked = 0

    def send(self, chunk: Chunk) -> None:
        raise AssertionError("nothing is sent here")

    finish = send

    def fail(self, error: TritandemError) -> None:
        raise AssertionError("nothing fails here")

    def cancelled(self) -> bool:
        time.sleep(self._trip_s)
        self.asked += 1
        return False


def watch_costs(streams: int, seconds: float, trip_s: float, poll_s: float) -> dict[str, float]:
    """CPU share of this process while nothing but the watch runs, and how often a stream is asked."""
    sinks = [QuietSink(trip_s) for _ in range(streams)]
    ids = np.array([1], dtype=np.int32)
    watch = CancelWatch(poll_s, SchedulerConfig().cancel_poll_share, lambda ticket: None)
    for i, sink in enumerate(sinks):
        watch.watch(Ticket(i, GenerationRequest(str(i), ids, SamplingParams()), sink, 0))
    watch.start()
    time.sleep(0.5)  # the measured mean cost settles
    asked, before = sum(sink.asked for sink in sinks), resource.getrusage(resource.RUSAGE_SELF)
    time.sleep(seconds)
    after = resource.getrusage(resource.RUSAGE_SELF)
    asked = sum(sink.asked for sink in sinks) - asked
    watch.close(5.0)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "streams": streams,
        "questions_s": round(asked / seconds),
        "asked_every_s": round(streams * seconds / max(1, asked), 3),
        "cpu_share_percent": round(100 * cpu_s / seconds, 2),
    }


def table(rows: list[dict[str, float]]) -> None:
    print(" | ".join(rows[0]))
    for row in rows:
        print(" | ".join(str(value) for value in row.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of each watch run")
    parser.add_argument("--trip-ms", type=float, default=0.1, help="what one question takes")
    parser.add_argument("--poll-s", type=float, default=0.1)
    options = parser.parse_args()
    picks = [queue_costs(waiting, tenants) for waiting in (64, 4096) for tenants in (1, 16, 1024)]
    table(picks)
    latency = [idle_latency(tick_s) for tick_s in (0.0, 0.001)]
    table(latency)
    watch = [
        watch_costs(streams, options.seconds, options.trip_ms / 1000, options.poll_s) for streams in (10, 50, 200, 1000)
    ]
    table(watch)
    document = {
        "queue": picks,
        "latency": latency,
        "watch": watch,
        "trip_ms": options.trip_ms,
        "poll_s": options.poll_s,
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
