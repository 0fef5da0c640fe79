"""The scheduler's CPU time per request and per response, apart from Triton: a real service between two doubles.

An engine in this process hands out one token of every sequence and waits until all of them were sent, so that no two
share a response. Two runs with different answer lengths give two equations for the two costs.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from ..config import SchedulerConfig
from ..contracts.answers import Chunk
from ..contracts.errors import EngineFailed, TritandemError
from ..contracts.fields import SamplingParams
from ..contracts.requests import EngineRequest, GenerationRequest, OutputOptions
from ..contracts.stream import FinishCode, LoadSnapshot, TokenBatch
from ..scheduler import SchedulerService, TextStreamsPort

STREAMS = 32
LONG_TOKENS = 64
PATIENCE_S = 60.0
# What one response to Triton takes; its sender sleeps meanwhile, and waking it up belongs to the cost.
ROUND_TRIP_S = 0.00012
PROMPT_TOKENS = 8
FIRST_ID = 1000  # ordinary words in most vocabularies


class Deliveries:
    """Counts responses; whoever waits is woken once, when there are enough: waking costs CPU time, too."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wanted_responses = self._wanted_ends = 1 << 62
        self.responses = self.ended = 0

    def add(self, ended: bool) -> None:
        with self._changed:
            self.responses += 1
            self.ended += ended
            if self.responses >= self._wanted_responses or self.ended >= self._wanted_ends:
                self._changed.notify_all()

    def wait_for_responses(self, count: int) -> None:
        """Raises EngineFailed when they do not come."""
        with self._changed:
            self._wanted_responses = count
            if not self._changed.wait_for(lambda: self.responses >= count, PATIENCE_S):
                raise EngineFailed(f"{self.responses} of {count} responses were delivered")

    def wait_for_ends(self, count: int) -> None:
        """Raises EngineFailed when they do not come."""
        with self._changed:
            self._wanted_ends = count
            if not self._changed.wait_for(lambda: self.ended >= count, PATIENCE_S):
                raise EngineFailed(f"{self.ended} of {count} answers ended")


class CountingSink:
    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries

    def send(self, chunk: Chunk) -> None:
        time.sleep(ROUND_TRIP_S)
        self._deliveries.add(ended=False)

    def finish(self, chunk: Chunk) -> None:
        time.sleep(ROUND_TRIP_S)
        self._deliveries.add(ended=True)

    def fail(self, error: TritandemError) -> None:
        raise error

    def cancelled(self) -> bool:
        return False


class LockstepEngine:
    """`EnginePort`: one token a sequence and message; the next message when every response has gone out.

    `cpu_s` is what its own thread used while it made the messages, which is not the scheduler's cost.
    """

    name = "lockstep"

    def __init__(self, deliveries: Deliveries, vocab_size: int) -> None:
        self._deliveries, self._vocab_size = deliveries, vocab_size
        self._submitted: queue.SimpleQueue[EngineRequest] = queue.SimpleQueue()
        self._load = LoadSnapshot(
            max_sequences=4 * STREAMS,
            max_context_tokens=1 << 20,
            free_blocks=1 << 20,
            total_blocks=1 << 20,
            block_tokens=16,
            decode_step_ns=1_000_000,
        )
        self.cpu_s = 0.0

    def submit(self, requests: Sequence[EngineRequest]) -> list[TritandemError | None]:
        for request in requests:
            self._submitted.put(request)
        return [None] * len(requests)

    def cancel(self, seq_ids: Sequence[int]) -> None:
        raise EngineFailed(f"nothing cancels during calibration, but {list(seq_ids)} were")

    def load(self) -> LoadSnapshot:
        return self._load

    def stream(self) -> Iterator[TokenBatch]:
        left: dict[int, int] = {}
        handed_out = self._deliveries.responses
        while True:
            try:
                while True:
                    request = self._submitted.get(timeout=0.0 if left else 0.5)
                    left[request.seq_id] = request.sampling.max_tokens
            except queue.Empty:
                if not left:
                    return
            start_s = time.thread_time()
            batch = self._batch(left)
            left = {seq_id: tokens - 1 for seq_id, tokens in left.items() if tokens > 1}
            self.cpu_s += time.thread_time() - start_s
            handed_out += len(batch.seq_ids)
            yield batch
            self._deliveries.wait_for_responses(handed_out)

    def _batch(self, left: dict[int, int]) -> TokenBatch:
        rows = len(left)
        tokens_left = np.fromiter(left.values(), np.int64, rows)
        return TokenBatch(
            seq_ids=np.fromiter(left, np.int64, rows),
            token_counts=np.ones(rows, np.int32),
            tokens=((FIRST_ID + tokens_left) % self._vocab_size).astype(np.int32),
            finish=np.where(tokens_left == 1, FinishCode.LENGTH, FinishCode.RUNNING).astype(np.uint8),
            cached_tokens=np.zeros(rows, np.int32),
            stamps_ns=np.full((rows, 4), time.monotonic_ns()),
            load=self._load,
        )


def scheduler_cost(text: TextStreamsPort, vocab_size: int, seconds: float) -> tuple[float, float]:
    """(CPU seconds per request, per response), detokenizing included. Raises EngineFailed when nothing moves."""
    return solve(run(text, vocab_size, 1, seconds / 2), run(text, vocab_size, LONG_TOKENS, seconds / 2))


def solve(short: tuple[int, int, float], long: tuple[int, int, float]) -> tuple[float, float]:
    """Costs (a, b) with requests x a + responses x b = CPU seconds in both runs; neither below 0.

    Noise can make the cost of a request come out negative: then all of the time is put on responses.
    """
    requests1, responses1, cpu1_s = short
    requests2, responses2, cpu2_s = long
    determinant = requests1 * responses2 - requests2 * responses1
    per_request = (cpu1_s * responses2 - cpu2_s * responses1) / determinant
    if per_request < 0:
        return 0.0, (cpu1_s + cpu2_s) / (responses1 + responses2)
    return per_request, max(0.0, (cpu2_s - requests2 * per_request) / responses2)


def run(text: TextStreamsPort, vocab_size: int, tokens: int, seconds: float) -> tuple[int, int, float]:
    """(requests, responses, CPU seconds) of rounds of STREAMS answers of `tokens` tokens each."""
    deliveries = Deliveries()
    engine = LockstepEngine(deliveries, vocab_size)
    service = SchedulerService([engine], text, SchedulerConfig(cancel_poll_s=60.0))
    service.start()
    requests, prompt = 0, np.arange(PROMPT_TOKENS, dtype=np.int32)
    try:
        while not service.ready():
            time.sleep(0.01)
        start_s, start_cpu_s = time.monotonic(), time.process_time()
        # By the clock: senders sleep most of the time, as they do while Triton takes a response.
        while time.monotonic() - start_s < seconds or not requests:
            for _ in range(STREAMS):
                sampling = SamplingParams(max_tokens=tokens)
                options = OutputOptions(stream=True)
                request = GenerationRequest(f"calibrate-{requests}", prompt, sampling, output=options)
                service.submit(request, CountingSink(deliveries))
                requests += 1
            deliveries.wait_for_ends(requests)
        cpu_s = time.process_time() - start_cpu_s - engine.cpu_s
        return requests, deliveries.responses, cpu_s
    finally:
        service.close()
