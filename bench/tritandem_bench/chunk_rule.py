"""How long newcomers wait and running streams pause under the engine's rule for prefill chunks: a simulation.

The engine's own core, batcher and pace and the scheduler's own rule of hand-over run here in simulated time; a step
takes what it was measured to take for an 8B model in bfloat16 on one H200 (`step_costs`). What Triton, the network
and the client add are two constants. Prints a table and, last, one JSON document; needs no device and no server.

    python -m tritandem_bench.chunk_rule --loads 300/128x256,1000/1000x256
"""

from __future__ import annotations

import argparse
import json
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode
from tritandem.engine.host.core import EngineCore
from tritandem.engine.host.outbox import Outbox
from tritandem.scheduler.batch_limits import adjust, initial
from tritandem.scheduler.dispatch import Demand, EngineView, has_room

from .step_costs import Clock, TimedRunner

TO_ENGINE_NS = 3_500_000  # tokenizer, scheduler and two hops: medians of a request's own stamps
TO_CLIENT_NS = 5_500_000  # hop, text, response, gRPC, client
RESPONSE_NS = 200_000  # between two responses: 5,000 a second is what Triton takes
LOOK_NS = 1_000_000  # between looks at arrivals
TARGET_STEP_NS = 50_000_000  # `target_inter_token_s`
DEFAULT_LOADS = "300/128x64,300/128x256,300/128x512,1000/1000x64,1000/1000x256,1000/1000x512,2000/128@8"
_TOKENS_PER_WORD = 1.089
_COLUMNS = ("tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "pause_ms_max", "gap_ms_p50", "gap_ms_p99")


@dataclass(frozen=True)
class Load:
    """A closed loop of `streams`, or an open one of `rate` requests/s."""

    words: int
    tokens: int
    streams: int = 0
    rate: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return round(self.words * _TOKENS_PER_WORD)

    def __str__(self) -> str:
        arrivals = f"{self.streams} streams" if self.streams else f"{self.rate:g}/s"
        return f"{self.words}/{self.tokens}, {arrivals}"


def read_loads(text: str) -> list[Load]:
    """`words/tokens` and `xSTREAMS` or `@RATE`, separated by commas."""
    loads = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)/(\d+)(?:x(\d+)|@([\d.]+))", part)
        if match is None:
            allowed = "WORDS/TOKENSxSTREAMS or WORDS/TOKENS@RATE"
            raise argparse.ArgumentTypeError(f"given {part!r}, allowed: {allowed}, separated by commas")
        words, tokens, streams, rate = match.groups()
        loads.append(Load(int(words), int(tokens), int(streams or 0), float(rate or 0)))
    return loads


@dataclass
class Request:
    """Times in ns at the client."""

    sent_ns: int
    arrived_ns: list[int] = field(default_factory=list)  # of each response
    tokens: list[int] = field(default_factory=list)  # in it


class Delivery:
    """Sends responses one after the other: first tokens first, then whoever has waited longest. What a stream gets
    while it waits is in one response."""

    def __init__(self) -> None:
        self._firsts: dict[int, int] = {}  # request -> tokens
        self._others: dict[int, int] = {}
        self._free_ns = 0

    def add(self, number: int, tokens: int, first: bool, now_ns: int) -> None:
        if not self.waiting():
            self._free_ns = max(self._free_ns, now_ns)
        waits = self._firsts if first or number in self._firsts else self._others
        waits[number] = waits.get(number, 0) + tokens

    def waiting(self) -> bool:
        return bool(self._firsts or self._others)

    def sent(self, now_ns: int) -> Iterator[tuple[int, int, int]]:
        """(request, tokens, when it arrives at the client) of the responses that have left by now."""
        while (waits := self._firsts or self._others) and self._free_ns + RESPONSE_NS <= now_ns:
            number = next(iter(waits))
            self._free_ns += RESPONSE_NS
            yield number, waits.pop(number), self._free_ns + TO_CLIENT_NS


class Simulation:
    """One engine, the scheduler's hand-over to it, and the clients."""

    def __init__(self, load: Load, seconds: float, seed: int = 0) -> None:
        self.load, self.clock, self._delivery = load, Clock(), Delivery()
        self.runner = TimedRunner(max(256, load.streams), self.clock)
        self.outbox = Outbox()
        self.core = EngineCore(self.runner, self.outbox, prefix_cache=False, now_ns=self.clock.read)
        self.requests: list[Request] = []
        self._news: deque[tuple[int, int]] = deque()  # (when the scheduler can hand it over, request)
        self._waiting: deque[int] = deque()  # at the scheduler
        self._given: dict[int, int] = {}  # by request: prompt tokens that are not prefilled yet
        self._limits = initial(self.core.load())
        self.start_ns = self.clock.now_ns
        self.until_ns = self.start_ns + round(seconds * 1e9)
        rng = np.random.default_rng(seed)
        if load.streams:
            # Clients start one after the other, as those of a load generator do.
            sent = (self.start_ns + np.sort(rng.integers(0, 20_000_000, load.streams))).tolist()
        else:
            sent = [self.start_ns + round(number * 1e9 / load.rate) for number in range(round(load.rate * seconds))]
        for at_ns in sent:
            self._send(at_ns)

    def run(self) -> None:
        """Until everything that was sent has been answered."""
        while self._news or self._waiting or self._delivery.waiting() or not self.core.idle():
            self._pass_on()
            if self.core.idle():
                self.clock.now_ns += LOOK_NS
                continue
            # As the engine's service does: until a launch is due, whoever arrives joins the step.
            while self.runner.busy() and (due_ns := self.core.launch_due_ns(False)) > self.clock.now_ns:
                self.clock.reach(min(due_ns, self.clock.now_ns + LOOK_NS))
                self._pass_on()
            self.core.step()
            self._take_tokens()
        self.core.check_integrity()

    # -- clients ---------------------------------------------------------------------------------------

    def _send(self, at_ns: int) -> None:
        if at_ns < self.until_ns:
            self._news.append((at_ns + TO_ENGINE_NS, len(self.requests)))
            self.requests.append(Request(at_ns))

    def _pass_on(self) -> None:
        """What clients, senders and the scheduler do meanwhile."""
        for number, tokens, at_ns in self._delivery.sent(self.clock.now_ns):
            request = self.requests[number]
            request.arrived_ns.append(at_ns)
            request.tokens.append(tokens)
            if self.load.streams and number not in self._given and sum(request.tokens) == self.load.tokens:
                self._send(at_ns)
        while self._news and self._news[0][0] <= self.clock.now_ns:
            self._waiting.append(self._news.popleft()[1])
        if self._waiting:
            self._hand_over()

    # -- scheduler -------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        load = self.core.load()
        self._limits = adjust(self._limits, load, len(self._given), TARGET_STEP_NS)
        prompt_tokens = self.load.prompt_tokens
        demand = Demand(prompt_tokens, prompt_tokens + self.load.tokens)
        while self._waiting:
            committed = len(self._given) * demand.expected_tokens
            view = EngineView(load, self._limits, len(self._given), committed, sum(self._given.values()))
            if not has_room(view, demand):
                return
            number = self._waiting.popleft()
            self._given[number] = prompt_tokens
            sampling = SamplingParams(max_tokens=self.load.tokens)
            self.core.add(EngineRequest(number, np.zeros(prompt_tokens, np.int32), sampling), self.clock.now_ns)

    def _take_tokens(self) -> None:
        batch = self.outbox.take(0.0)
        if batch is None:
            return
        ended = (batch.finish != FinishCode.RUNNING).tolist()
        for number, tokens, last in zip(batch.seq_ids.tolist(), batch.token_counts.tolist(), ended, strict=True):
            self._delivery.add(number, tokens, self._given[number] > 0, self.clock.now_ns)
            self._given[number] = 0
            if last:
                del self._given[number]


def figures(simulation: Simulation, warmup_s: float) -> dict[str, Any]:
    """Of requests sent after the warm-up; tokens/s of the window between the two. Times in ms."""
    from_ns, to_ns = simulation.start_ns + round(warmup_s * 1e9), simulation.until_ns
    counted = [request for request in simulation.requests if request.sent_ns >= from_ns]
    at_ns = np.concatenate([request.arrived_ns for request in simulation.requests])
    tokens = np.concatenate([request.tokens for request in simulation.requests])
    every = int(tokens[(at_ns >= from_ns) & (at_ns < to_ns)].sum())
    ttft_ms = np.array([request.arrived_ns[0] - request.sent_ns for request in counted]) / 1e6
    gap_ms = np.concatenate([np.diff(request.arrived_ns) for request in counted]) / 1e6  # between responses
    load = simulation.core.load()
    return {
        "load": str(simulation.load),
        "requests": len(counted),
        "tokens_per_s": round(every / ((to_ns - from_ns) / 1e9)),
        "ttft_ms_p50": round(float(np.percentile(ttft_ms, 50)), 1),
        "ttft_ms_p99": round(float(np.percentile(ttft_ms, 99)), 1),
        "pause_ms_max": round(float(gap_ms.max()), 1),
        "gap_ms_p50": round(float(np.percentile(gap_ms, 50)), 1),
        "gap_ms_p99": round(float(np.percentile(gap_ms, 99)), 1),
        "preemptions": load.preemptions,
    }


def measure(load: Load, seconds: float, warmup_s: float) -> dict[str, Any]:
    """One load: `figures` of a simulation over `seconds`, the warm-up included, and until every answer has ended."""
    simulation = Simulation(load, seconds)
    simulation.run()
    return figures(simulation, warmup_s)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    help_text = "WORDS/TOKENSxSTREAMS (closed loop) or WORDS/TOKENS@RATE (open), separated by commas"
    parser.add_argument("--loads", type=read_loads, default=DEFAULT_LOADS, help=help_text)
    parser.add_argument("--seconds", type=float, default=65.0, help="simulated, the warm-up included")
    parser.add_argument("--warmup", type=float, default=5.0, help="requests sent in it are not counted")
    args = parser.parse_args(arguments)
    if args.seconds <= args.warmup:
        parser.error(f"--seconds: given {args.seconds:g}, allowed: more than --warmup, which is {args.warmup:g}")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    print(f"{'load':26}" + "".join(f"{column:>14}" for column in _COLUMNS))
    rows = []
    for load in args.loads:
        rows.append(measure(load, args.seconds, args.warmup))
        print(f"{rows[-1]['load']:26}" + "".join(f"{rows[-1][column]:14}" for column in _COLUMNS), flush=True)
    print(json.dumps({"seconds": args.seconds, "warmup_s": args.warmup, "rows": rows}))


if __name__ == "__main__":
    main()
