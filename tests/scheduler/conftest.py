"""A running scheduler over fakes, checked when the test is over."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from tritandem.config import SchedulerConfig
from tritandem.contracts import EnginePort, GenerationRequest, SamplingParams
from tritandem.scheduler import FinishedRequest, SchedulerService, SchedulerSnapshot

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.text_streams import FakeTextStreams  # noqa: E402


class RecordingObserver:
    def __init__(self) -> None:
        self.records: list[FinishedRequest] = []

    def finished(self, record: FinishedRequest) -> None:
        self.records.append(record)

    def gauges(self, snapshot: SchedulerSnapshot) -> None:
        assert snapshot.buffered_chars >= 0


class Running:
    """A service with what its test wants to look at."""

    def __init__(self, service: SchedulerService, observer: RecordingObserver, text: FakeTextStreams) -> None:
        self.service, self.observer, self.text = service, observer, text


Start = Callable[..., Running]


@pytest.fixture
def start() -> Iterator[Start]:
    """`start(engines, **config)`; at the end every book must be empty and every request accounted for once."""
    started: list[Running] = []

    def run(engines: Sequence[EnginePort], connect: bool = True, **settings: object) -> Running:
        observer, text = RecordingObserver(), FakeTextStreams()
        config = SchedulerConfig(**{"cancel_poll_s": 0.01, "sender_threads": 2, **settings})  # type: ignore[arg-type]
        service = SchedulerService(engines, text, config, observer)
        service.start()
        running = Running(service, observer, text)
        started.append(running)
        if connect:
            wait_until(service.ready)
        return running

    yield run
    for running in started:
        assert running.service.drain(10.0), "requests are left open"
        running.service.check_integrity()
        outcomes = running.service.snapshot().outcomes
        assert sum(outcomes.values()) == len(running.observer.records)
        running.service.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """For states nobody announces; wakes often, fails loudly."""
    import threading
    import time

    until, tick = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        assert time.monotonic() < until, "not within the time"
        tick.wait(0.001)


def request(first_id: int = 1, max_tokens: int = 4, prompt_tokens: int = 3, **fields: object) -> GenerationRequest:
    ids = np.full(prompt_tokens, first_id, dtype=np.int32)
    fields.setdefault("request_id", f"r{first_id}")
    return GenerationRequest(input_ids=ids, sampling=SamplingParams(max_tokens=max_tokens), **fields)  # type: ignore[arg-type]
