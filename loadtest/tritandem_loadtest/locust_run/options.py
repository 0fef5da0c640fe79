"""The flags that `locust -f` gains, and the RunConfig they make. They also appear in the form of Locust's web page."""

from __future__ import annotations

from typing import Any

from ..config import LoadTestError, RunConfig, settings

_ENDLESS_S = 1e7
_DEFAULTS = RunConfig()
# Host, users, run time and processes are Locust's own; it has no warm-up, and ends what runs in its own way.
_NOT_HERE = {"url", "headers", "duration_s", "max_requests", "users", "processes"}
_NOT_HERE |= {"slo_percentile", "late_after_ms", "warmup_s", "drain_s", "out_dir"}
FIELDS = {name: setting for name, setting in settings().items() if name not in _NOT_HERE}


def add_arguments(parser: Any) -> None:
    """Flags are named after the fields: `--prompt-words`, `--ignore-eos` ..."""
    group = parser.add_argument_group("Token streams")
    for name, setting in FIELDS.items():
        flag, default = "--" + name.replace("_", "-"), getattr(_DEFAULTS, name)
        if isinstance(default, bool):
            group.add_argument(flag, action="store_true", help=setting.doc)
        elif setting.parse:  # the form knows text only
            group.add_argument(flag, type=str, default="", help=setting.doc)
        else:
            group.add_argument(flag, type=type(default), default=default, choices=setting.choices, help=setting.doc)
    group.add_argument("--stamps-dir", default="", help="write raw stamps (JSONL) here, one file a process")
    for action in group._group_actions:
        action.include_in_web_ui = True  # Locust's parser marks what is added to itself, not to a group


def run_config(options: Any, host: str | None) -> RunConfig:
    """Raises LoadTestError for a value that is out of range."""
    values = {}
    for name, setting in FIELDS.items():
        values[name] = getattr(options, name)
        if setting.parse:
            values[name] = setting.parse(values[name])
    try:
        run_time_s = float(options.run_time or _ENDLESS_S)
    except ValueError as error:
        raise LoadTestError(f"run_time: {error}") from None
    if host:
        values["url"] = host if options.protocol != "grpc" else host.removeprefix("http://").rstrip("/")
    return RunConfig(**values, duration_s=run_time_s, users=options.num_users or 0)
