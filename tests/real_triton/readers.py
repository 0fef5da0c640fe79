"""Clients that stream from a server until something happens."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from tests.soak.served import Served

LONG = {"max_tokens": 4000, "sampling_parameters": {"ignore_eos": True}}
WAYS = [(protocol, model) for protocol in ("grpc", "http") for model in ("scheduler", "ensemble")]


@dataclass
class Reader:
    """One client in the middle of an answer. `ended_s` is when its stream ended, `error` how; None: well."""

    served: Served
    protocol: str
    model: str
    options: dict[str, object] = field(default_factory=lambda: dict(LONG))
    started: threading.Event = field(default_factory=threading.Event)
    ended_s: float = 0.0
    error: Exception | None = None
    tokens: int = 0

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            with self.served.client(self.protocol, self.model) as client:
                for chunk in client.stream("1, 2, 3, 4,", **self.options):
                    self.tokens += chunk.num_output_tokens
                    self.started.set()
        except Exception as error:
            self.error = error
        self.ended_s = time.monotonic()
        self.started.set()


def readers(served: Served, count: int, **options: object) -> list[Reader]:
    """So many clients on every way, all of them streaming."""
    made = [Reader(served, *way, options=options or dict(LONG)) for way in WAYS for _ in range(count)]
    for reader in made:
        assert reader.started.wait(60)
        assert reader.error is None, reader.error
    return made
