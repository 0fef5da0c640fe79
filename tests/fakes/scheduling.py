"""A scheduler service over fakes, and the small things its tests share."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
from tritandem.contracts.errors import Outcome
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import GenerationRequest
from tritandem.scheduler import FinishedRequest, SchedulerService, SchedulerSnapshot

from tests.fakes.text_streams import FakeTextStreams


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

    def outcomes(self) -> Counter[Outcome]:
        """Of all requests that have ended, also of those whose last response is still under way."""
        records = list(self.observer.records)
        endings = [ticket.life.ending for ticket in list(self.service._open.values())]
        return Counter(end.outcome for end in (*records, *endings) if end is not None)


Start = Callable[..., Running]


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """For states nobody announces; wakes often, fails loudly."""
    until, tick = time.monotonic() + timeout_s, threading.Event()
    while not condition():
        assert time.monotonic() < until, "not within the time"
        tick.wait(0.001)


def request(first_id: int = 1, max_tokens: int = 4, prompt_tokens: int = 3, **fields: object) -> GenerationRequest:
    ids = np.full(prompt_tokens, first_id, dtype=np.int32)
    fields.setdefault("request_id", f"r{first_id}")
    return GenerationRequest(input_ids=ids, sampling=SamplingParams(max_tokens=max_tokens), **fields)  # type: ignore[arg-type]
