"""What the scheduler costs per token and per response, without Triton and without a model.

An engine in this process makes tokens at a given rate and, like the real one, puts everything made since the last
pull into one message. Sinks sleep for one process round trip. `--text MODEL_DIR` detokenizes with a real tokenizer,
otherwise text is one table look-up a token. Prints a table and, last, one JSON document.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tritandem.config import SchedulerConfig
from tritandem.contracts.answers import Chunk
from tritandem.contracts.arrays import Int32Array
from tritandem.contracts.errors import TritandemError
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest, GenerationRequest, OutputOptions
from tritandem.contracts.stream import FinishCode, LoadSnapshot, TokenBatch
from tritandem.scheduler import SchedulerService, TextStreamsPort

VOCABULARY = 32_000
FIRST_TOKEN = 1000  # below it tokenizers keep special tokens, which are no text


class PacedEngine:
    """`rate` tokens/s over all sequences, evenly; token i of a sequence is due at start + i * streams / rate."""

    name = "paced"

    def __init__(self, streams: int, rate: float) -> None:
        self._streams, self._step_s = streams, streams / rate
        self._budgets: dict[int, int] = {}
        self._full = threading.Event()
        self._first_ns = 0
        self.messages = 0
        self._load = LoadSnapshot(max_sequences=streams, max_context_tokens=1 << 20, decode_step_ns=1_000_000)

    def submit(self, requests: Sequence[EngineRequest]) -> list[TritandemError | None]:
        for request in requests:
            self._budgets[request.seq_id] = request.sampling.max_tokens
        if len(self._budgets) == self._streams:
            self._full.set()
        return [None] * len(requests)

    def cancel(self, seq_ids: Sequence[int]) -> None:
        raise AssertionError(f"nothing cancels in this benchmark, but {seq_ids} were")

    def load(self) -> LoadSnapshot:
        return self._load

    def stream(self) -> Iterator[TokenBatch]:
        self._full.wait()
        seq_ids = np.array(list(self._budgets), dtype=np.int64)
        total = next(iter(self._budgets.values()))
        made, start_s = 0, time.perf_counter()
        while made < total:
            due = min(total, int((time.perf_counter() - start_s) / self._step_s))
            if due == made:
                time.sleep(max(0.0, start_s + (made + 1) * self._step_s - time.perf_counter()))
                continue
            yield self._batch(seq_ids, made, due, last=due == total)
            self.messages += 1
            made = due
        self._budgets.clear()

    def _batch(self, seq_ids: Any, made: int, due: int, last: bool) -> TokenBatch:
        rows, new = len(seq_ids), due - made
        stamps = np.zeros((rows, 4), dtype=np.int64)
        self._first_ns = self._first_ns or time.monotonic_ns()
        stamps[:, 2], stamps[:, 3] = self._first_ns, time.monotonic_ns()
        return TokenBatch(
            seq_ids=seq_ids,
            token_counts=np.full(rows, new, dtype=np.int32),
            tokens=np.tile((FIRST_TOKEN + np.arange(made, due, dtype=np.int32)) % VOCABULARY, rows),
            finish=np.full(rows, int(FinishCode.LENGTH if last else FinishCode.RUNNING), dtype=np.uint8),
            cached_tokens=np.zeros(rows, dtype=np.int32),
            stamps_ns=stamps,
            load=self._load,
        )


class TableStep(NamedTuple):
    text: str
    stopped: bool
    tokens_used: int


class TableText:
    """The cheapest detokenizer there can be: what is left is the scheduler's own cost."""

    def __init__(self) -> None:
        self._words = [f" w{i}" for i in range(VOCABULARY)]

    def open(self, prompt_ids: Int32Array, stop_words: tuple[str, ...]) -> None:
        return None

    def push(self, states: list[Any], tokens: Int32Array, counts: Int32Array) -> list[TableStep]:
        ids, words, steps, start = tokens.tolist(), self._words, [], 0
        for count in counts.tolist():
            steps.append(TableStep("".join([words[i] for i in ids[start : start + count]]), False, count))
            start += count
        return steps

    def flush(self, state: Any) -> str:
        return ""


class SleepingSink:
    """A round trip of `trip_s` that releases the interpreter lock, as a Triton response does."""

    def __init__(self, trip_s: float, ended: threading.Semaphore) -> None:
        self._trip_s, self._ended = trip_s, ended
        self.responses = self.tokens = 0
        self.first_late_s: float | None = None

    def send(self, chunk: Chunk) -> None:
        time.sleep(self._trip_s)
        self.responses += 1
        self.tokens += chunk.num_output_tokens

    def finish(self, chunk: Chunk) -> None:
        self.send(chunk)
        assert chunk.stamps is not None
        self.first_late_s = (chunk.stamps.first_sent_ns - chunk.stamps.first_token_ns) / 1e9
        self._ended.release()

    def fail(self, error: TritandemError) -> None:
        raise error

    def cancelled(self) -> bool:
        time.sleep(self._trip_s)
        return False


def measure(
    streams: int, rate: float, tokens_each: int, trip_s: float, threads: int, text: TextStreamsPort
) -> dict[str, Any]:
    """One run: `streams` answers of `tokens_each` tokens offered at `rate` tokens/s in all."""
    engine, ended = PacedEngine(streams, rate), threading.Semaphore(0)
    service = SchedulerService([engine], text, SchedulerConfig(sender_threads=threads))
    service.start()
    while not service.ready():
        time.sleep(0.01)
    sinks = [SleepingSink(trip_s, ended) for _ in range(streams)]
    before, start_s = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    for i, sink in enumerate(sinks):
        ids = np.array([i, i + 1, i + 2], dtype=np.int32)
        request = GenerationRequest(
            f"r{i}", ids, SamplingParams(max_tokens=tokens_each), output=OutputOptions(stream=True)
        )
        service.submit(request, sink)
    for _ in sinks:
        ended.acquire()
    wall_s, after = time.perf_counter() - start_s, resource.getrusage(resource.RUSAGE_SELF)
    service.drain(5.0)
    service.check_integrity()
    service.close()
    tokens, responses = sum(sink.tokens for sink in sinks), sum(sink.responses for sink in sinks)
    assert tokens == streams * tokens_each, f"{tokens} tokens delivered of {streams * tokens_each}"
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    late_ms = sorted(1000 * sink.first_late_s for sink in sinks if sink.first_late_s is not None)
    return {
        "streams": streams,
        "offered_tokens_s": round(rate),
        "delivered_tokens_s": round(tokens / wall_s),
        "responses_s": round(responses / wall_s),
        "tokens_per_response": round(tokens / responses, 2),
        "messages_s": round(engine.messages / wall_s),
        "cpu_us_per_token": round(1e6 * cpu_s / tokens, 2),
        "cpu_us_per_response": round(1e6 * cpu_s / responses, 1),
        "cpu_share": round(cpu_s / wall_s, 2),
        "first_response_ms_p50": round(late_ms[len(late_ms) // 2], 1),
        "first_response_ms_max": round(late_ms[-1], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--rates", type=float, nargs="+", default=[5_000, 30_000, 1_000_000], help="tokens/s offered")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of each run at the offered rate")
    parser.add_argument("--trip-ms", type=float, default=0.12, help="what one response takes")
    parser.add_argument("--sender-threads", type=int, default=2)
    parser.add_argument("--text", type=Path, help="a model folder: use its tokenizer")
    parser.add_argument("--switch-interval-ms", type=float, help="sys.setswitchinterval, for comparison")
    options = parser.parse_args()
    if options.switch_interval_ms:
        sys.setswitchinterval(options.switch_interval_ms / 1000)
    text: TextStreamsPort = TableText()
    if options.text:
        from tritandem.tokenizer.load import load_text_streams

        text = load_text_streams(options.text)
    results = []
    for streams in options.streams:
        for rate in options.rates:
            tokens_each = max(16, int(min(rate, 100_000) * options.seconds / streams))
            results.append(measure(streams, rate, tokens_each, options.trip_ms / 1000, options.sender_threads, text))
            if len(results) == 1:
                print(" | ".join(results[0]))
            print(" | ".join(str(value) for value in results[-1].values()), flush=True)
    print(json.dumps({"trip_ms": options.trip_ms, "sender_threads": options.sender_threads, "runs": results}))


if __name__ == "__main__":
    main()
