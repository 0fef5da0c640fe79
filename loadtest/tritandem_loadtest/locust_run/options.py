"""The flags that `locust -f` gains, and the RunConfig they make. They also appear in the form of Locust's web page."""

from __future__ import annotations

import json
from typing import Any

from ..config import ARRIVALS, GRPC_CLIENTS, PROTOCOLS, WORKLOADS, LoadTestError, RunConfig, parse_slo
from ..dialects import DIALECTS

_ENDLESS_S = 1e7
_DEFAULTS = RunConfig()
_CHOICES = {
    "protocol": PROTOCOLS,
    "grpc_client": GRPC_CLIENTS,
    "dialect": tuple(sorted(DIALECTS)),
    "arrival": ARRIVALS,
    "workload": WORKLOADS,
}
# RunConfig fields in the order of the form; host, users and run time are Locust's own.
_PLAIN = {
    "protocol": "grpc, http (generate_stream) or openai",
    "dialect": "whose tensor names to speak",
    "model": "model name; empty: the dialect's",
    "arrival": "when requests are due; closed: every user keeps a stream busy",
    "rps": "requests a second over all workers",
    "burstiness": "gamma: coefficient of variation of the gaps",
    "ramp_to_rps": "ramp: the rate at the end of the run",
    "trace": "trace: CSV or JSONL file",
    "workload": "what is sent",
    "prompt_words": "N, uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA",
    "output_tokens": "same syntax",
    "prompt_pool": "words: so many prompts, sent again and again; 0: none twice",
    "shared_prefix_words": "length of shared system prompts",
    "shared_prefixes": "how many of them",
    "chat_turns": "turns of a conversation",
    "prompts": "jsonl: file with prompts",
    "ignore_eos": "always generate output_tokens tokens",
    "seed": "of arrivals and prompts",
    "timeout_s": "of one request",
    "grpc_client": "grpcio: slower, for comparison",
    "connections": "gRPC connections of each process",
}
_TEXT = {
    "steps_rps": "steps: rates, each for an equal part of the run time, such as 1,4,8",
    "sampling": 'JSON object such as {"temperature": 0.7}',
    "slo": "such as ttft=500ms,itl=50ms; missed: exit code 1",
    "stamps_dir": "write raw stamps (JSONL) here, one file a process",
}


def add_arguments(parser: Any) -> None:
    """Flags are named after the fields: `--prompt-words`, `--ignore-eos` ..."""
    group = parser.add_argument_group("Token streams")
    for name, text in _PLAIN.items():
        flag, default = "--" + name.replace("_", "-"), getattr(_DEFAULTS, name)
        if isinstance(default, bool):
            group.add_argument(flag, action="store_true", help=text)
        else:
            group.add_argument(flag, type=type(default), default=default, choices=_CHOICES.get(name), help=text)
    for name, text in _TEXT.items():
        group.add_argument("--" + name.replace("_", "-"), type=str, default="", help=text)
    for action in group._group_actions:
        action.include_in_web_ui = True  # Locust's parser marks what is added to itself, not to a group


def run_config(options: Any, host: str | None) -> RunConfig:
    """Raises LoadTestError for a value that is out of range."""
    values = {name: getattr(options, name) for name in _PLAIN}
    try:
        values["sampling"] = json.loads(options.sampling) if options.sampling else {}
        values["steps_rps"] = tuple(float(rate) for rate in options.steps_rps.split(",") if rate)
        run_time_s = float(options.run_time or _ENDLESS_S)
    except ValueError as error:
        raise LoadTestError(f"sampling, steps_rps or run_time: {error}") from None
    if host:
        values["url"] = host if options.protocol != "grpc" else host.removeprefix("http://").rstrip("/")
    return RunConfig(**values, slo=parse_slo(options.slo), duration_s=run_time_s, users=options.num_users or 0)
