"""A running scheduler over fakes, checked when the test is over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from tritandem.config import SchedulerConfig
from tritandem.contracts.stream import EnginePort
from tritandem.scheduler import SchedulerService

from tests.fakes.scheduling import RecordingObserver, Running, Start, wait_until
from tests.fakes.text_streams import FakeTextStreams


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
        if not running.service._closed:  # what comes after the end is refused without a record
            submitted = next(running.service._numbers)
            wait_until(
                lambda running=running, submitted=submitted: (
                    sum(record.sequences for record in running.observer.records) == submitted
                )
            )
        running.service.close()
