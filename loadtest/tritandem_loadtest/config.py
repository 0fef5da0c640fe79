"""The whole description of one load-test run, parsed once and passed between processes as JSON.

Owns names, defaults and ranges. Knows nothing about sockets, Locust or plots.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

ARRIVALS = ("constant", "poisson", "gamma", "ramp", "steps", "trace", "closed")
WORKLOADS = ("words", "bundled", "shared-prefix", "chat", "jsonl")
PROTOCOLS = ("grpc", "http", "openai")
GRPC_CLIENTS = ("h2", "grpcio")
SLO_METRICS = ("ttft", "second_token", "itl", "itl_chunk", "pause", "tpot", "e2e")


class LoadTestError(Exception):
    """A run cannot be started or was cut short; the text says what to do."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One run. Times are seconds unless the name says otherwise.

    `arrival="closed"` keeps `users` streams busy and ignores `rps`; every other arrival process is open loop.
    `users` bounds the streams in flight (0: enough for `rps`). `prompt_words` and `output_tokens` are length
    specifications, see `workload.parse_length`. `slo` maps a metric to its limit in milliseconds.
    """

    url: str = "localhost:8001"
    protocol: str = "grpc"
    grpc_client: str = "h2"
    dialect: str = "tritandem"
    model: str = ""  # "": the dialect's own
    connections: int = 4  # per process, gRPC only
    headers: dict[str, str] = field(default_factory=dict)  # of every request; they may be keys: in no file

    arrival: str = "constant"
    rps: float = 1.0
    duration_s: float = 30.0
    burstiness: float = 2.0  # gamma: coefficient of variation of the gaps
    ramp_to_rps: float = 0.0
    steps_rps: tuple[float, ...] = ()
    trace: str = ""
    max_requests: int = 0  # 0: only the duration ends the run
    users: int = 0
    processes: int = 1

    workload: str = "bundled"
    prompt_words: str = "300"
    output_tokens: str = "64"
    prompt_pool: int = 0  # words: so many prompts, each sent again and again; 0: none twice
    shared_prefix_words: int = 500
    shared_prefixes: int = 4
    chat_turns: int = 4
    prompts: str = ""  # JSONL file for workload "jsonl"
    ignore_eos: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    seed: int = 0

    slo: dict[str, float] = field(default_factory=dict)
    slo_percentile: float = 99.0
    late_after_ms: float = 25.0
    warmup_s: float = 0.0  # requests due in the first seconds are sent but not counted
    timeout_s: float = 120.0
    drain_s: float = 60.0
    out_dir: str = ""

    def __post_init__(self) -> None:
        """Raises LoadTestError naming the field, what was given and what is allowed."""
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise LoadTestError(f"{name}: given {getattr(self, name)!r}, allowed: {', '.join(allowed)}")
        for name, low in _LOWEST.items():
            if not getattr(self, name) >= low:
                raise LoadTestError(f"{name}: given {getattr(self, name)!r}, allowed: at least {low}")
        unknown = set(self.slo) - set(SLO_METRICS)
        if unknown:
            raise LoadTestError(f"slo: unknown metric {sorted(unknown)[0]!r}, allowed: {', '.join(SLO_METRICS)}")
        if self.arrival in ("constant", "poisson", "gamma", "ramp") and self.rps <= 0:
            raise LoadTestError(f"rps: given {self.rps!r}, allowed: above 0")
        if self.arrival == "steps" and not self.steps_rps:
            raise LoadTestError("steps_rps: the arrival process 'steps' needs at least one rate")
        if self.arrival == "trace" and not Path(self.trace).is_file():
            raise LoadTestError(f"trace: {self.trace!r} is not a file")
        if self.workload == "jsonl" and not Path(self.prompts).is_file():
            raise LoadTestError(f"prompts: {self.prompts!r} is not a file")
        if self.prompt_pool and self.workload != "words":
            raise LoadTestError(f"prompt_pool: given {self.prompt_pool!r}, allowed with workload 'words' only")
        if not 0 < self.slo_percentile <= 100:
            raise LoadTestError(f"slo_percentile: given {self.slo_percentile!r}, allowed: above 0, at most 100")
        if self.warmup_s >= self.duration_s:
            raise LoadTestError(f"warmup_s: given {self.warmup_s!r}, allowed: less than duration_s")

    @property
    def user_count(self) -> int:
        """Streams that may be in flight at once, over all processes."""
        if self.users:
            return self.users
        if self.arrival == "closed":
            return 1
        return max(32, int(self.peak_rps * 20))

    @property
    def peak_rps(self) -> float:
        """The highest rate the schedule asks for (0 for a closed loop or a trace)."""
        if self.arrival in ("closed", "trace"):
            return 0.0
        return max((self.rps, self.ramp_to_rps, *self.steps_rps))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> RunConfig:
        """Raises LoadTestError for an unknown key."""
        values = json.loads(text)
        unknown = set(values) - {f.name for f in fields(cls)}
        if unknown:
            raise LoadTestError(f"unknown configuration key {sorted(unknown)[0]!r}")
        values["steps_rps"] = tuple(values.get("steps_rps", ()))
        return cls(**values)


_CHOICES: dict[str, tuple[str, ...]] = {
    "protocol": PROTOCOLS,
    "grpc_client": GRPC_CLIENTS,
    "arrival": ARRIVALS,
    "workload": WORKLOADS,
}
_LOWEST: dict[str, float] = {
    "duration_s": 0.1,
    "burstiness": 0.05,
    "users": 0,
    "processes": 1,
    "connections": 1,
    "timeout_s": 0.1,
    "warmup_s": 0,
    "drain_s": 0,
    "late_after_ms": 0,
    "max_requests": 0,
    "chat_turns": 1,
    "shared_prefixes": 1,
    "prompt_pool": 0,
}


def parse_prompts(text: str) -> int:
    """`"distinct"` -> 0, `"pool:16"` -> 16: how many prompts a benchmark repeats. Raises LoadTestError."""
    kind, _, size = text.partition(":")
    if text == "distinct":
        return 0
    if kind == "pool" and size.isdecimal() and int(size) > 0:
        return int(size)
    raise LoadTestError(f"prompts: given {text!r}, allowed: distinct or pool:N with N at least 1")


def parse_slo(text: str) -> dict[str, float]:
    """`"ttft=500ms,itl=0.05s"` -> `{"ttft": 500.0, "itl": 50.0}` (milliseconds). Raises LoadTestError."""
    limits: dict[str, float] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = part.partition("=")
        number, factor = value.strip(), 1.0
        if number.endswith("ms"):
            number = number[:-2]
        elif number.endswith("s"):
            number, factor = number[:-1], 1000.0
        try:
            limits[name.strip()] = float(number) * factor
        except ValueError:
            raise LoadTestError(f"slo: {part!r} is not METRIC=NUMBER[ms|s]") from None
    return limits
