"""What the scheduler costs per token and per response, without Triton and without a model.

An engine in this process makes tokens at a given rate and, like the real one, puts everything made since the last
pull into one message. Sinks sleep for one process round trip. `--text MODEL_DIR` detokenizes with a real tokenizer,
otherwise text is one table look-up a token. Prints a table and, last, one JSON document.

    python -m tritandem_bench.scheduler --seconds 3
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from tritandem.config import SchedulerConfig
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import GenerationRequest, OutputOptions
from tritandem.scheduler import SchedulerService, TextStreamsPort

from .stand_ins import FreeRunningService, ServicePort, SleepingSink, TableText

MOST_TOKENS = 1 << 20  # of an answer


def measure(
    streams: int, rate: float, tokens_each: int, trip_s: float, threads: int, text: TextStreamsPort
) -> dict[str, Any]:
    """One run: `streams` answers of `tokens_each` tokens offered at `rate` tokens/s in all."""
    engine = ServicePort(FreeRunningService(streams / rate, streams, MOST_TOKENS))
    ended = threading.Semaphore(0)
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
        "responses": responses,
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
