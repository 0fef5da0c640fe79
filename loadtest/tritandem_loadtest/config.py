"""The whole description of one load-test run, parsed once and passed between processes as JSON.

Owns names, defaults and ranges. Knows nothing about sockets, Locust or plots.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from .dialects import DIALECTS

ARRIVALS = ("constant", "poisson", "gamma", "ramp", "steps", "trace", "closed")
WORKLOADS = ("words", "bundled", "shared-prefix", "chat", "jsonl")
PROTOCOLS = ("grpc", "http", "openai")
GRPC_CLIENTS = ("h2", "grpcio")
SLO_METRICS = ("ttft", "second_token", "itl", "itl_chunk", "pause", "tpot", "e2e")


class LoadTestError(Exception):
    """A run cannot be started or was cut short; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a field of RunConfig says of itself: its meaning, what is allowed, its flag on our command line (Locust's
    has the field's name), and how its text is read where the type of its default does not say."""

    doc: str
    flag: str = ""
    choices: tuple[str, ...] | None = None
    low: float | None = None
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None


def _about(doc: str, flag: str = "", **more: Any) -> dict[str, Setting]:
    return {"setting": Setting(doc, flag, **more)}


def _setting(default: Any, doc: str, flag: str = "", **more: Any) -> Any:
    return field(default=default, metadata=_about(doc, flag, **more))


def parse_rates(text: str) -> tuple[float, ...]:
    """`"1,2,4"`; "": none. Raises LoadTestError."""
    try:
        return tuple(float(part) for part in text.split(",") if part)
    except ValueError:
        raise LoadTestError(f"given {text!r}, allowed: rates such as 1,2,4") from None


def parse_header(text: str) -> tuple[str, str]:
    """`"NAME: VALUE"`. Raises LoadTestError."""
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise LoadTestError(f"given {text!r}, allowed: NAME:VALUE")
    return name.strip(), value.strip()


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object; "": an empty one. Raises LoadTestError."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise LoadTestError(f"given {text!r}, not JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoadTestError(f"given {text!r}, allowed: a JSON object")
    return value


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


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One run. Times are seconds unless the name says otherwise.

    `arrival="closed"` keeps `users` streams busy and ignores `rps`; every other arrival process is open loop.
    `prompt_words` and `output_tokens` are length specifications, see `workload.parse_length`. `slo` maps a metric to
    its limit in milliseconds.
    """

    url: str = _setting("localhost:8001", "HOST:PORT of gRPC, or the http(s):// base URL")
    protocol: str = _setting("grpc", "grpc, http (generate_stream) or openai", choices=PROTOCOLS)
    grpc_client: str = _setting("h2", "grpcio: slower, for comparison", choices=GRPC_CLIENTS)
    dialect: str = _setting("tritandem", "whose tensor names to speak", choices=tuple(sorted(DIALECTS)))
    model: str = _setting("", "model name; empty: the dialect's")
    connections: int = _setting(4, "gRPC connections of each process", low=1)
    headers: dict[str, str] = field(
        default_factory=dict,
        metadata=_about(
            "of every request, such as 'Authorization: Bearer KEY'; kept in no file",
            "--header",
            metavar="NAME:VALUE",
            parse=parse_header,
        ),
    )

    arrival: str = _setting(
        "constant", "when requests are due; closed: every user keeps a stream busy", choices=ARRIVALS
    )
    rps: float = _setting(1.0, "requests a second (open loop), over all processes")
    duration_s: float = _setting(30.0, "of the schedule", "--duration", low=0.1, metavar="SECONDS")
    burstiness: float = _setting(2.0, "gamma: coefficient of variation of the gaps", low=0.05)
    ramp_to_rps: float = _setting(0.0, "ramp: the rate at the end of the run", "--ramp-to", metavar="RPS")
    steps_rps: tuple[float, ...] = _setting(
        (), "steps: rates, each for an equal part of the run, such as 1,4,8", "--steps", parse=parse_rates
    )
    trace: str = _setting("", "trace: CSV or JSONL with time, prompt_tokens, output_tokens", metavar="FILE")
    max_requests: int = _setting(0, "stop after so many; 0: by duration", "--requests", low=0)
    users: int = _setting(0, "streams in flight at most; 0: 20 seconds of --rps", low=0)
    processes: int = _setting(1, "load-generating processes", low=1)

    workload: str = _setting("bundled", "what is sent", choices=WORKLOADS)
    prompt_words: str = _setting("300", "N, uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA")
    output_tokens: str = _setting("64", "same syntax; sent as max_tokens")
    structured_percent: int = _setting(
        0, "of the requests ask for JSON of full length, each by a schema of its own", low=0
    )
    prompt_pool: int = _setting(0, "words: so many prompts, sent again and again; 0: none twice", low=0)
    shared_prefix_words: int = _setting(500, "length of shared system prompts")
    shared_prefixes: int = _setting(4, "how many different ones", low=1)
    chat_turns: int = _setting(4, "turns of a conversation", low=1)
    prompts: str = _setting("", "jsonl: file with prompts", metavar="FILE")
    ignore_eos: bool = _setting(False, "always generate output_tokens tokens")
    sampling: dict[str, Any] = field(
        default_factory=dict, metadata=_about('JSON object such as {"temperature": 0.7}', parse=parse_object)
    )
    seed: int = _setting(0, "of arrivals and prompts")

    slo: dict[str, float] = field(
        default_factory=dict, metadata=_about("such as ttft=500ms,itl=50ms; missed: exit code 1", parse=parse_slo)
    )
    slo_percentile: float = _setting(99.0, "at which --slo must hold")
    late_after_ms: float = _setting(25.0, "a request sent later is missed", low=0)
    warmup_s: float = _setting(0.0, "sent but not counted", "--warmup", low=0, metavar="SECONDS")
    timeout_s: float = _setting(120.0, "of one request", "--timeout", low=0.1, metavar="SECONDS")
    drain_s: float = _setting(60.0, "for requests in flight at the end", "--drain", low=0, metavar="SECONDS")
    out_dir: str = _setting("", "raw stamps, figures and report.html go here", "--out", metavar="DIR")

    def __post_init__(self) -> None:
        """Raises LoadTestError naming the field, what was given and what is allowed."""
        for name, setting in settings().items():
            given, allowed = getattr(self, name), setting.choices
            if allowed and given not in allowed:
                raise LoadTestError(f"{name}: given {given!r}, allowed: {', '.join(allowed)}")
            if setting.low is not None and not given >= setting.low:
                raise LoadTestError(f"{name}: given {given!r}, allowed: at least {setting.low:g}")
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


def settings() -> dict[str, Setting]:
    """What stands beside each field of RunConfig, by its name."""
    return {one.name: one.metadata["setting"] for one in fields(RunConfig)}
