"""Every setting, parsed once at the edge into frozen dataclasses with units in the names.

Tier 0. A configuration is one TOML file with the tables [engine], [scheduler], [tokenizer], [telemetry], [placement],
[watch]; unknown keys are refused. Inside Triton the file's path comes from the environment variable TRITANDEM_CONFIG
and the model's folder from TRITANDEM_MODEL, so that the model repository can be mounted as it is.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .contracts.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MODEL_ENV = "TRITANDEM_MODEL"
CONFIG_ENV = "TRITANDEM_CONFIG"
PLACEMENT_ENV = "TRITANDEM_PLACEMENT"  # replaces the table [placement]; `placement_from_words` says how
HEARTBEAT_ENV = "TRITANDEM_HEARTBEAT"  # where a model's process beats: this with its process id; unset: nowhere
DRAIN_KEY_ENV = "TRITANDEM_DRAIN_KEY"  # who knows it may ask the scheduler to drain; made anew for every server
INNER_KEY_ENV = "TRITANDEM_INNER_KEY"  # what the models know each other by; made anew for every server

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine on one device. Sizes of 0 mean: derive from what the device has."""

    device: str = "auto"  # auto | cpu | cuda | cuda:N
    dtype: str = "auto"  # auto: bfloat16 on CUDA, float32 on CPU
    block_tokens: int = 16
    num_blocks: int = 0  # 0: from kv_memory_fraction (CUDA) or cpu_kv_bytes (CPU)
    kv_memory_fraction: float = 0.9  # of the device memory left after weights and graphs
    cpu_kv_bytes: int = 1 << 30
    max_sequences: int = 0  # slots; 0: 256 on CUDA, 16 on CPU
    max_context_tokens: int = 0  # 0: the model's own limit, or less where KV memory is short
    prefill_tokens_per_step: int = 0  # chunk budget; 0: 8192 on CUDA, 256 on CPU
    interleaved_prefill_tokens: int = 0  # the same while sequences decode; 0: 2048 on CUDA, no less on CPU
    prefix_cache: bool = True
    attention: str = "auto"  # auto | dense | paged
    cuda_graphs: bool = True
    graph_capture: str = (
        "start"  # start: all sizes, measured; lazy: each on its first use, which pauses running streams
    )
    compile: bool = True
    launch_ahead_steps: int = 3  # replays launched before their tokens are read (CUDA only)
    stream_idle_s: float = 1.0  # the token stream ends after this long without live sequences
    random_weights: bool = False  # for benchmarks: weights from the config alone
    random_weights_seed: int = 0
    threads: int = 0  # torch intra-op threads; 0: what the machine has left


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Admission, order and delivery."""

    max_queued_requests: int = 4096  # and before them as many texts that wait for the tokenizer
    max_queued_tokens: int = 4_000_000  # prompt + output budget over all queued requests
    default_max_tokens: int = 256
    default_priority: str = "normal"  # interactive | normal | batch
    ageing_s: float = 10.0  # waiting this long lifts a request by one priority class
    default_deadline_s: float = 0.0  # 0: none
    # No request takes longer, waiting included (0: none): Triton does not always say that a client has gone. Half an
    # hour is 36,000 tokens at `target_inter_token_s`.
    max_request_s: float = 1800.0
    reserve_for_higher_classes: bool = True  # a lower class leaves as many places as higher ones have lately used
    fair_share: bool = True  # tenants share by served tokens
    prefix_affinity: bool = True
    prefix_cache_scope: str = "tenant"  # tenant: nobody learns from `cached_tokens` what another sent | shared
    dynamic_batch: bool = True
    target_inter_token_s: float = 0.05
    tick_s: float = 0.001  # requests that arrive within one tick travel in one submit
    sender_threads: int = 2
    max_buffered_chars: int = 1 << 20  # of one slow client; beyond it the request ends as FAILED
    cancel_poll_s: float = 0.1
    cancel_poll_share: float = 0.02  # of one core; with many streams it makes the poll interval longer
    drain_timeout_s: float = 30.0
    engine_silence_s: float = 1.0  # an engine that says nothing for so long is asked whether it lives
    engine_answer_s: float = 3.0  # a call unanswered for so long takes the engine out


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """Text to ids and back."""

    fast: bool = True  # use fastokens when installed and proven equal
    shadow_check_rate: float = 0.001  # share of fast-path requests that are checked again
    piece_chars: int = 2048  # slow path: size of the pieces between safe cuts
    inline_chars: int = 16384  # shorter texts are encoded in the calling thread
    prefix_cache_bytes: int = 64 << 20
    prefix_cache: bool = True
    escape_special_tokens_in_chat: bool = True  # a user cannot inject control tokens through a message
    threads: int = 0  # for long texts; 0: from the cores of this process


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """What is measured and where it is shown."""

    metrics: bool = True  # custom metrics on Triton's /metrics
    metrics_period_s: float = 2.0
    request_log: bool = True  # one JSON line per finished request in Triton's log
    traces_url: str = ""  # OpenTelemetry spans go here over OTLP/HTTP: http://collector:4318/v1/traces; "": none


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Which CPUs each component runs on. Lists are the kernel's: "2-5,8"; an empty one leaves a component unpinned."""

    policy: str = "auto"  # auto: from the machine | explicit: the lists below | off
    engine: str = ""  # the engine's process
    engine_host: str = ""  # its thread that launches steps (CUDA only); "": with the engine
    scheduler: str = ""
    tokenizer: str = ""
    server: str = ""  # Triton's own threads


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """When a process of the server counts as hung; `tritandem serve` kills it then and starts the server afresh. Time
    in which it waited for a core does not count, but for `stopped_s`."""

    stopped_s: float = 2.0  # stopped by a signal
    silent_s: float = 15.0  # no heartbeat: the interpreter is held, or the machine has stopped giving it memory
    call_s: float = 30.0  # one call of Triton's, one round of the scheduling thread, one response on its way to Triton
    step_s: float = 120.0  # one step on the device; may hold a compilation, and on a CPU a whole prefill chunk
    load_s: float = 120.0  # the start of the tokenizer or the scheduler, which takes 2 to 20


@dataclass(frozen=True, slots=True)
class Config:
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)


_RANGES: Mapping[type, Mapping[str, tuple[float, float]]] = {  # both ends allowed; others: 0 or more
    EngineConfig: {
        "block_tokens": (1, 1024),
        "kv_memory_fraction": (0.01, 1.0),
        "cpu_kv_bytes": (1 << 20, math.inf),
        "max_sequences": (0, 4096),
        "launch_ahead_steps": (0, 16),
        "stream_idle_s": (0.01, 3600.0),
        "threads": (0, 1024),
    },
    SchedulerConfig: {
        "max_queued_requests": (1, math.inf),
        "max_queued_tokens": (1, math.inf),
        "default_max_tokens": (1, math.inf),
        "ageing_s": (0.001, math.inf),
        "target_inter_token_s": (0.0001, math.inf),
        "tick_s": (0.0, 1.0),
        "sender_threads": (1, 64),
        "max_buffered_chars": (1, math.inf),
        "cancel_poll_s": (0.01, 60.0),
        "cancel_poll_share": (0.0001, 1.0),
        "engine_silence_s": (0.05, 3600.0),
        "engine_answer_s": (0.05, 3600.0),
    },
    TokenizerConfig: {"shadow_check_rate": (0.0, 1.0), "piece_chars": (16, 1 << 24), "threads": (0, 1024)},
    TelemetryConfig: {"metrics_period_s": (0.1, 3600.0)},
    WatchConfig: {
        "stopped_s": (0.5, 86_400.0),
        "silent_s": (3.0, 86_400.0),
        "call_s": (5.0, 86_400.0),
        "step_s": (5.0, 86_400.0),
        "load_s": (5.0, 86_400.0),
    },
}
_CHOICES: Mapping[type, Mapping[str, tuple[str, ...]]] = {
    EngineConfig: {
        "attention": ("auto", "dense", "paged"),
        "dtype": ("auto", "bfloat16", "float16", "float32"),
        "graph_capture": ("start", "lazy"),
    },
    SchedulerConfig: {
        "default_priority": ("interactive", "normal", "batch"),
        "prefix_cache_scope": ("tenant", "shared"),
    },
    PlacementConfig: {"policy": ("auto", "explicit", "off")},
}


def is_device(text: str) -> bool:
    """Whether `text` names a device; whether the machine has it is another question."""
    return re.fullmatch(r"auto|cpu|cuda(:\d{1,4})?", text, re.ASCII) is not None


def is_traces_url(text: str) -> bool:
    """Whether spans can be sent to `text` over OTLP/HTTP; "" sends none."""
    if not text:
        return True
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, a port that is none
        return False


DEVICE_FORMS = "auto, cpu, cuda, cuda:N"
# Texts of some form: what tells it, and the form in words.
_FORMS: Mapping[type, Mapping[str, tuple[Callable[[str], bool], str]]] = {
    EngineConfig: {"device": (is_device, DEVICE_FORMS)},
    TelemetryConfig: {"traces_url": (is_traces_url, 'http://HOST:PORT/PATH, https://..., or "" for none')},
}


def _disallowed(cls: type, key: str, value: object) -> str | None:
    """What is allowed, in words, when `value` is not."""
    if isinstance(value, str):
        has_form, form = _FORMS.get(cls, {}).get(key, (None, ""))
        if has_form is not None:
            return None if has_form(value) else form
        choices = _CHOICES.get(cls, {}).get(key)
        return None if choices is None or value in choices else ", ".join(choices)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    low, high = _RANGES.get(cls, {}).get(key, (0, math.inf))
    if low <= value <= high and math.isfinite(value):
        return None
    return f"{low:g} or more" if high == math.inf else f"{low:g} to {high:g}"


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build the dataclass `cls` from `values`. Raises ConfigError for a bad key, type or value."""
    hints = typing.get_type_hints(cls)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ConfigError(f"{where}.{unknown[0]}: unknown key; known keys: {', '.join(sorted(hints))}")
    built: dict[str, Any] = {}
    for key, value in values.items():
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{where}.{key}: given {value!r}, allowed: a table")
            built[key] = from_mapping(typing.cast("type[Any]", hint), value, f"{where}.{key}")
            continue
        if hint is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
            raise ConfigError(f"{where}.{key}: given {value!r}, allowed: a value of type {hint.__name__}")
        if (allowed := _disallowed(cls, key, value)) is not None:
            raise ConfigError(f"{where}.{key}: given {value!r}, allowed: {allowed}")
        built[key] = value
    return cls(**built)


def load_config(path: Path | None) -> Config:
    """Parse a TOML file; None gives the defaults. Raises ConfigError naming file and key."""
    if path is None:
        return Config()
    try:
        with path.open("rb") as file:
            values = tomllib.load(file)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return from_mapping(Config, values, path.name)


def config_from_environment() -> Config:
    """The configuration of a process inside Triton. Raises ConfigError."""
    path = os.environ.get(CONFIG_ENV)
    return with_placement(load_config(Path(path) if path else None), os.environ.get(PLACEMENT_ENV, ""))


def with_placement(config: Config, words: str) -> Config:
    """`config` with the placement that `words` describe; as it is when there are none. Raises ConfigError."""
    return dataclasses.replace(config, placement=placement_from_words(words)) if words else config


def placement_from_words(words: str) -> PlacementConfig:
    """`auto`, `off`, or COMPONENT=CPUS words separated by spaces, which make it explicit. Raises ConfigError."""
    if words in ("auto", "off"):
        return PlacementConfig(policy=words)
    lists: dict[str, str] = {}
    for word in words.split():
        name, equals, cpus = word.partition("=")
        if not equals or name in lists:
            raise ConfigError(f"placement: given {word!r}, allowed: auto, off, or COMPONENT=CPUS once for each")
        lists[name] = cpus
    if "policy" in lists:
        raise ConfigError("placement: given 'policy=...', allowed: auto, off, or COMPONENT=CPUS")
    return from_mapping(PlacementConfig, {"policy": "explicit", **lists}, "placement")


def heartbeat_from_environment() -> Path | None:
    """The file in which this process says that it lives; None: nobody watches."""
    prefix = os.environ.get(HEARTBEAT_ENV)
    return Path(f"{prefix}{os.getpid()}") if prefix else None


def model_folder_from_environment() -> Path:
    """The model's folder of a process inside Triton. Raises ConfigError when unset or missing."""
    value = os.environ.get(MODEL_ENV)
    if not value:
        raise ConfigError(f"{MODEL_ENV}: not set; it names the model's folder (config.json, weights, tokenizer.json)")
    path = Path(value)
    if not path.exists():
        raise ConfigError(f"{MODEL_ENV}: {path} does not exist")
    return path
