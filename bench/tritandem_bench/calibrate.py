"""Measures what `tritandem size` reckons with on this machine: in this process, without server or GPU.

CPU time is that of the whole process, so that helper threads count, and the stand-ins' own share is in it; run it on a
machine that is otherwise quiet. Writes the file that `tritandem size --coefficients` reads.

    python -m tritandem_bench.calibrate --output costs.json [--model smollm2]
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from tritandem.config import TokenizerConfig
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode
from tritandem.engine.host.core import EngineCore
from tritandem.engine.host.outbox import Outbox
from tritandem.engine.step import RunnerSpec, StepPlan, StepResult
from tritandem.models import resolve_model
from tritandem.scheduler import TextStreamsPort
from tritandem.sizing import Coefficients, load_coefficients
from tritandem.tokenizer import TextTokenizer, load_tokenizer

from .scheduler import measure
from .tokenizer_texts import Corpus

MEASURED = "measured by `tritandem_bench.calibrate`"
NOT_MEASURED = "triton_cpu_s_per_response"  # no server is started here
TEXT_CHARS = {"prose": 15_000, "code": 15_000}
STREAMS, LONG_TOKENS = 32, 64
STREAM_TOKENS_PER_S = 100.0  # of each: so slow that no two tokens share a response
TRIP_S, SENDER_THREADS = 0.00012, 2
ROWS, CONTEXT_TOKENS, BLOCK_TOKENS, VOCABULARY = 64, 640, 16, 1000
PROMPT_TOKENS = 128


# -- tokenizer -----------------------------------------------------------------------------------------


def encode_rate(tokenizer: TextTokenizer, text: str, seconds: float) -> float:
    """Tokens per second of CPU time, over at least `seconds` of it."""
    tokenizer.encode(text)  # lazy parts of the engines
    tokens, start_s = 0, time.process_time()
    while (spent_s := time.process_time() - start_s) < seconds or not tokens:
        tokens += len(tokenizer.encode(text).ids)
    return tokens / spent_s


# -- scheduler -----------------------------------------------------------------------------------------


def scheduler_cost(text: TextStreamsPort, seconds: float) -> tuple[float, float]:
    """(CPU seconds per request, per response), detokenizing included: two runs whose answers differ in length."""

    def run(tokens: int) -> tuple[int, int, float]:
        requests, responses, cpu_s, until_s = 0, 0, 0.0, time.monotonic() + seconds / 2
        while not requests or time.monotonic() < until_s:
            row = measure(STREAMS, STREAMS * STREAM_TOKENS_PER_S, tokens, TRIP_S, SENDER_THREADS, text)
            requests, responses = requests + STREAMS, responses + row["responses"]
            cpu_s += row["cpu_us_per_response"] * row["responses"] / 1e6
        return requests, responses, cpu_s

    return solve(run(1), run(LONG_TOKENS))


def solve(short: tuple[int, int, float], long: tuple[int, int, float]) -> tuple[float, float]:
    """Costs (a, b) with requests x a + responses x b = CPU seconds in both runs; a is not below 0, and b is above it.

    Noise can make either cost come out as nothing or less: then all of the time is put on responses.
    """
    requests1, responses1, cpu1_s = short
    requests2, responses2, cpu2_s = long
    determinant = requests1 * responses2 - requests2 * responses1
    per_request = (cpu1_s * responses2 - cpu2_s * responses1) / determinant
    per_response = (cpu2_s - requests2 * per_request) / responses2
    if per_request < 0 or per_response <= 0:
        return 0.0, (cpu1_s + cpu2_s) / (responses1 + responses2)
    return per_request, per_response


# -- engine --------------------------------------------------------------------------------------------


class InstantRunner:
    """A runner whose device takes no time: rows all get token 1 and end when their budget is used up."""

    def __init__(self) -> None:
        blocks = 1 + ROWS * (1 + CONTEXT_TOKENS // BLOCK_TOKENS)
        prefill = (8192, 8192, ((ROWS, 8192),))
        self.spec = RunnerSpec("none", ROWS, blocks, BLOCK_TOKENS, CONTEXT_TOKENS, *prefill, VOCABULARY, 0)
        self.masks = np.zeros((0, 0), np.int32)
        self._left = np.zeros(ROWS, np.int64)
        self._unread: deque[StepResult] = deque()

    def launch(self, plan: StepPlan) -> None:
        for init in plan.inits:
            self._left[init.slot] = init.sampling.max_tokens
        slots = np.array([*(chunk.slot for chunk in plan.prefill if chunk.last), *plan.decode_slots], np.int32)
        self._left[slots] -= 1
        finish = np.where(self._left[slots] == 0, FinishCode.LENGTH, FinishCode.RUNNING).astype(np.uint8)
        now_ns = time.monotonic_ns()
        self._unread.append(StepResult(plan.step_id, slots, np.ones_like(slots), finish, now_ns, now_ns))

    def masks_ready(self, step_id: int) -> None:
        """Nothing waits."""

    def collect(self, wait: bool) -> StepResult | None:
        return self._unread.popleft() if self._unread else None

    def pending(self) -> int:
        return len(self._unread)

    def busy(self) -> bool:
        return False

    def prepare(self) -> bool:
        return False

    def close(self) -> None:
        self._unread.clear()


def engine_cost(seconds: float) -> float:
    """CPU seconds a step of ROWS decoding sequences costs its thread, over at least `seconds` of them: planning,
    bookkeeping and handing tokens out. What a launch adds is not in it."""
    steps, start_s, spent_s, seq_id = 0, time.thread_time(), 0.0, 0
    while spent_s < seconds:
        outbox = Outbox()
        core = EngineCore(InstantRunner(), outbox)
        for _ in range(ROWS):
            seq_id += 1
            ids = np.full(PROMPT_TOKENS, seq_id % VOCABULARY, np.int32)
            sampling = SamplingParams(max_tokens=CONTEXT_TOKENS - PROMPT_TOKENS)
            core.add(EngineRequest(seq_id, ids, sampling), time.monotonic_ns())
        while not core.idle():
            core.step()
            outbox.take(0.0)
            steps += 1
        spent_s = time.thread_time() - start_s
    return spent_s / steps


# -- command -------------------------------------------------------------------------------------------


def calibrate(model: Path, seconds: float, say: Callable[[str], None]) -> dict[str, object]:
    """The document that `tritandem size` reads; each part takes about `seconds`. Raises ConfigError for a bad model."""
    defaults, corpus = load_coefficients(), Corpus(random.Random(0))
    prompt = "\n".join(corpus.text(kind, chars) for kind, chars in TEXT_CHARS.items())
    rates: dict[bool, float] = {}
    for fast in (False, True):
        # Every text goes the same way, and nothing is remembered or checked beside.
        config = TokenizerConfig(fast=fast, shadow_check_rate=0.0, prefix_cache=False)
        tokenizer = load_tokenizer(model, config)
        try:
            in_use = not fast or tokenizer.stats().fast_enabled
            rates[fast] = encode_rate(tokenizer, prompt, seconds) if in_use else 0.0
            say(f"tokenizer, {'fast' if fast else 'slow'} path: {rates[fast]:,.0f} tokens per core-second")
            if not fast:
                per_request_s, per_response_s = scheduler_cost(tokenizer.streams(), seconds)
        finally:
            tokenizer.close()
    say(f"scheduler: {1e6 * per_request_s:.0f} us a request, {1e6 * per_response_s:.0f} us a response")
    step_s = engine_cost(seconds)
    say(f"engine: {1e6 * step_s:.0f} us of host time a step of {ROWS} sequences")
    values = Coefficients(
        tokenizer_fast_tokens_per_core_s=rates[True],
        tokenizer_slow_tokens_per_core_s=rates[False],
        scheduler_cpu_s_per_request=per_request_s,
        scheduler_cpu_s_per_response=per_response_s,
        triton_cpu_s_per_response=defaults.values.triton_cpu_s_per_response,
        engine_host_s_per_step=step_s,
    )
    return {
        "measured_on": datetime.date.today().isoformat(),
        "machine": machine_name(),
        "coefficients": {
            key: {"value": float(f"{value:.4g}"), "source": defaults.sources[key] if key == NOT_MEASURED else MEASURED}
            for key, value in dataclasses.asdict(values).items()
        },
    }


def machine_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name and how many of its cores this process may use."""
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU")
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=argparse.FileType("w"), required=True, metavar="FILE")
    parser.add_argument("--model", default="smollm2", metavar="DIR|GGUF|NAME", help="whose tokenizer is measured")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each (default: %(default)s)")
    args = parser.parse_args(arguments)

    def say(line: str) -> None:
        print(line, flush=True)

    with args.output as output:
        json.dump(calibrate(resolve_model(args.model, say), args.seconds, say), output, indent=2)
    say(f"written; use it with: tritandem size --coefficients {args.output.name} ...")


if __name__ == "__main__":
    main()
