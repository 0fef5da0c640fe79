"""Every setting, parsed once at the edge into frozen dataclasses; a field says itself what is allowed and meant.

Tier 0. A configuration is one TOML file with the tables [engine], [scheduler], [tokenizer], [telemetry], [placement],
[watch]; unknown keys are refused. Inside Triton the file's path comes from the environment variable TRITANDEM_CONFIG
and the model's folder from TRITANDEM_MODEL, so that the model repository can be mounted as it is.
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from .contracts.errors import ConfigError
from .machine.device import FORMS as DEVICE_FORMS
from .machine.device import is_device

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MODEL_ENV = "TRITANDEM_MODEL"
CONFIG_ENV = "TRITANDEM_CONFIG"
GENERATION_ENV = "TRITANDEM_GENERATION_CONFIG"
QUANTIZATION_ENV = "TRITANDEM_QUANTIZATION"
KV_DTYPE_ENV = "TRITANDEM_KV_DTYPE"
# Each replaces one setting: its table and name.
REPLACING = {
    GENERATION_ENV: ("scheduler", "generation_config"),
    QUANTIZATION_ENV: ("engine", "quantization"),
    KV_DTYPE_ENV: ("engine", "kv_dtype"),
}
PLACEMENT_ENV = "TRITANDEM_PLACEMENT"  # replaces the table [placement]; `placement_from_words` says how
HEARTBEAT_ENV = "TRITANDEM_HEARTBEAT"  # where a model's process beats: this with its process id; unset: nowhere
DRAIN_KEY_ENV = "TRITANDEM_DRAIN_KEY"  # who knows it may ask the scheduler to drain; made anew for every server
INNER_KEY_ENV = "TRITANDEM_INNER_KEY"  # what the models know each other by; made anew for every server
RELAY_SUFFIX = "_calls"  # NAME_calls is the relay of the engine NAME, and of no other

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Setting:
    """What a field says of itself: its meaning, and what is allowed: both ends of numbers, choices or form of texts."""

    doc: str
    low: float = 0
    high: float = math.inf
    choices: tuple[str, ...] = ()
    has_form: Callable[[str], bool] | None = None
    form: str = ""  # in words

    @property
    def allowed(self) -> str:
        """In the words of an error and of the documentation."""
        span = f"{self.low:.15g} or more" if self.high == math.inf else f"{self.low:.15g} to {self.high:.15g}"
        return self.form or ", ".join(self.choices) or span

    def allows(self, value: object) -> bool:
        """Whether a value of the right type is within what is allowed."""
        if isinstance(value, str):
            return self.has_form(value) if self.has_form else not self.choices or value in self.choices
        if isinstance(value, bool) or not isinstance(value, int | float):
            return True
        return self.low <= value <= self.high and math.isfinite(value)


def _setting(default: Any, doc: str, low: float = 0, high: float = math.inf, **more: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(doc, low, high, **more)})


def is_traces_url(text: str) -> bool:
    """Whether spans can be sent to `text` over OTLP/HTTP; "" sends none."""
    if not text:
        return True
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # brackets that do not match, a port that is none
        return False


_URL_FORMS = 'http://HOST:PORT/PATH, https://..., or "" for none'
_DAY_S, _HOUR_S = 86_400.0, 3600.0


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine. Sizes of 0 mean: derive from what the device has."""

    device: str = _setting(
        "auto",
        "auto: a GPU where there is one; joined by +: one model cut over several",
        has_form=is_device,
        form=DEVICE_FORMS,
    )
    dtype: str = _setting(
        "auto", "auto: bfloat16 on CUDA, float32 on a CPU", choices=("auto", "bfloat16", "float16", "float32")
    )
    quantization: str = _setting(
        "none",
        "whole weights are quantized at load; fp8: with a scale a row; int4: uncalibrated, with a scale for 128 inputs",
        choices=("none", "fp8", "int4"),
    )
    unquantized_layers: str = _setting(
        "lm_head", "layers that `quantization` leaves as they are: names, with * for anything, separated by commas"
    )
    kv_dtype: str = _setting(
        "auto",
        "type of the KV cache; auto: `dtype`; fp8_e4m3: half the bytes of bf16, twice as many blocks; on a GPU from "
        "compute capability 8.9 on",
        choices=("auto", "bf16", "fp8_e4m3"),
    )
    block_tokens: int = _setting(16, "tokens of one KV block", 1, 1024)
    num_blocks: int = _setting(0, "KV blocks; 0: as many as kv_memory_fraction (CUDA) or cpu_kv_bytes (CPU) hold")
    kv_memory_fraction: float = _setting(
        0.9, "share of the device memory left after weights and graphs that the KV cache gets (CUDA)", 0.01, 1.0
    )
    cpu_kv_bytes: int = _setting(1 << 30, "size of the KV cache on a CPU", 1 << 20)
    max_sequences: int = _setting(0, "sequences that run at once; 0: 256 on CUDA, 16 on a CPU", 0, 4096)
    max_context_tokens: int = _setting(
        0, "prompt and answer together; 0: the model's own limit, less where KV memory is short"
    )
    prefill_tokens_per_step: int = _setting(0, "prompt tokens of one step; 0: 8192 on CUDA, 256 on a CPU")
    interleaved_prefill_tokens: int = _setting(0, "the same while sequences decode; 0: 2048 on CUDA, no less on a CPU")
    prefix_cache: bool = _setting(True, "KV blocks of prompts are kept for later requests that begin alike")
    attention: str = _setting("auto", "auto: paged where its kernels run", choices=("auto", "dense", "paged"))
    cuda_graphs: bool = _setting(True, "steps are replayed as CUDA Graphs")
    graph_capture: str = _setting(
        "idle",
        "idle: those that are needed most before the engine is ready, the others while nothing runs; start: all of "
        "them before it is ready",
        choices=("idle", "start"),
    )
    compile: bool = _setting(True, "models of known form run on fused kernels; false: on transformers' own code")
    launch_ahead_steps: int = _setting(3, "replays launched before their tokens are read (CUDA only)", 0, 16)
    forced_run_tokens: int = _setting(
        4, "so many tokens that a structure leaves no choice about are taken in one step, fewer one by one; 0: never"
    )
    stream_idle_s: float = _setting(1.0, "the call that carries tokens ends so long after the last one", 0.01, _HOUR_S)
    random_weights: bool = _setting(False, "for benchmarks: weights from config.json alone")
    random_weights_seed: int = _setting(0, "seed of those weights")
    rank_patience_s: float = _setting(
        1.5, "a device of several that keeps the others waiting for longer in a step ends the engine", 0.1, _HOUR_S
    )
    threads: int = _setting(0, "threads that torch computes with; 0: what the machine has left", 0, 1024)


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Admission, order and delivery."""

    max_queued_requests: int = _setting(
        4096, "requests that wait for an engine; before them as many texts may wait for the tokenizer", 1
    )
    max_queued_tokens: int = _setting(4_000_000, "prompt tokens and output budget over all requests that wait", 1)
    default_max_tokens: int = _setting(256, "budget of an answer whose request names none", 1)
    generation_config: str = _setting(
        "none",
        "auto: sampling fields that a request leaves out are as the model's authors recommend",
        choices=("none", "auto"),
    )
    default_priority: str = _setting(
        "normal", "class of a request that names none", choices=("interactive", "normal", "batch")
    )
    ageing_s: float = _setting(10.0, "waiting this long lifts a request by one priority class", 0.001)
    exclude_input_in_output: str = _setting(
        "streams",
        "answers without the prompt, unless a request says it: those that are streamed, all or none",
        choices=("streams", "all", "none"),
    )
    default_deadline_s: float = _setting(0.0, "deadline of a request that names none, from its arrival; 0: none")
    # Triton does not always say that a client has gone. Half an hour is 36,000 tokens at `target_inter_token_s`.
    max_request_s: float = _setting(1800.0, "no request takes longer, waiting included; 0: without end")
    reserve_for_higher_classes: bool = _setting(
        True, "a lower class leaves as many places as higher ones have lately used"
    )
    fair_share: bool = _setting(True, "tenants share by served tokens")
    prefix_affinity: bool = _setting(True, "a request goes to the engine that has its beginning in the prefix cache")
    prefix_cache_scope: str = _setting(
        "tenant",
        "tenant: nobody learns from `cached_tokens` what another sent; shared: by all",
        choices=("tenant", "shared"),
    )
    dynamic_batch: bool = _setting(True, "the number of sequences follows the measured step time")
    target_inter_token_s: float = _setting(0.05, "inter-token latency that dynamic_batch aims at", 0.0001)
    tick_s: float = _setting(0.001, "requests that arrive within one tick travel in one submit", 0.0, 1.0)
    sender_threads: int = _setting(2, "threads that hand responses to Triton", 1, 64)
    sender_share: float = _setting(
        0.7,
        "share of their time that responses may take; many streams get longer ones, evenly; 1: no intervals",
        0.01,
        1.0,
    )
    max_buffered_chars: int = _setting(
        1 << 20, "unread text of one slow client; beyond it the request ends as FAILED", 1
    )
    cancel_poll_s: float = _setting(0.1, "time between two looks at whether a client has gone", 0.01, 60.0)
    cancel_poll_share: float = _setting(
        0.02, "share of one core for those looks; with many streams it makes them rarer", 0.0001, 1.0
    )
    drain_timeout_s: float = _setting(30.0, "running requests get this long when the server is told to stop")
    engine_silence_s: float = _setting(
        1.0, "an engine that says nothing for so long is asked whether it lives", 0.05, _HOUR_S
    )
    engine_answer_s: float = _setting(3.0, "a call unanswered for so long takes the engine out", 0.05, _HOUR_S)


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """Text to ids and back."""

    fast: bool = _setting(True, "use fastokens when installed and proven equal")
    shadow_check_rate: float = _setting(
        0.001, "share of fast-path requests that are encoded again the slow way and compared", 0.0, 1.0
    )
    piece_chars: int = _setting(2048, "slow path: size of the pieces between the safe cuts of a long text", 16, 1 << 24)
    inline_chars: int = _setting(16384, "shorter texts are encoded in the calling thread")
    prefix_cache_bytes: int = _setting(64 << 20, "memory for beginnings of texts and their ids")
    prefix_cache: bool = _setting(True, "a text that begins like an earlier one is encoded from there on")
    escape_special_tokens_in_chat: bool = _setting(True, "a user cannot inject control tokens through a message")
    threads: int = _setting(0, "threads that share a long text; 0: from the cores of the process", 0, 1024)


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """What is measured and where it is shown."""

    metrics: bool = _setting(True, "the families `tritandem_*` on Triton's /metrics")
    metrics_period_s: float = _setting(2.0, "time between two publications of them", 0.1, _HOUR_S)
    request_log: bool = _setting(True, "one JSON line per finished request in Triton's log")
    traces_url: str = _setting(
        "", "OpenTelemetry spans go here over OTLP/HTTP", has_form=is_traces_url, form=_URL_FORMS
    )


def _cpus(doc: str) -> Any:
    return _setting("", doc, form="a list of CPUs")


@dataclass(frozen=True, slots=True)
class PlacementConfig:
    """Which CPUs each component runs on. Lists are the kernel's: "2-5,8"; an empty one leaves a component unpinned."""

    policy: str = _setting(
        "auto", "auto: from the machine; explicit: the lists below", choices=("auto", "explicit", "off")
    )
    engine: str = _cpus("the engine's process")
    engine_host: str = _cpus('its thread that launches steps (CUDA only); "": with the engine')
    scheduler: str = _cpus("the scheduler's process")
    tokenizer: str = _cpus("the tokenizer's processes")
    server: str = _cpus("Triton's own threads")


@dataclass(frozen=True, slots=True)
class WatchConfig:
    """When a process of the server counts as hung; `tritandem serve` kills it then and starts the server afresh. Time
    in which it waited for a core does not count, but for `stopped_s`."""

    stopped_s: float = _setting(2.0, "the process is stopped by a signal for so long", 0.5, _DAY_S)
    silent_s: float = _setting(
        15.0,
        "no heartbeat for so long: the interpreter is held, or the machine has stopped giving it memory",
        3.0,
        _DAY_S,
    )
    call_s: float = _setting(
        30.0,
        "at most for one call of Triton's, one round of the scheduling thread, one response on its way to Triton",
        5.0,
        _DAY_S,
    )
    step_s: float = _setting(
        120.0,
        "at most for one step on the device; it may hold a compilation, and on a CPU a whole prefill chunk",
        5.0,
        _DAY_S,
    )
    load_s: float = _setting(
        120.0, "at most for the start of the tokenizer or the scheduler, which takes 2 to 20 s", 5.0, _DAY_S
    )


@dataclass(frozen=True, slots=True)
class Config:
    engine: EngineConfig = field(default_factory=EngineConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    telemetry: TelemetryConfig = field(default_factory=TelemetryConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)


def settings_of(table: type) -> dict[str, Setting]:
    """By key, in the order of the table; fields that are tables themselves are left out."""
    return {f.name: f.metadata["setting"] for f in dataclasses.fields(table) if "setting" in f.metadata}


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build the dataclass `cls` from `values`. Raises ConfigError for a bad key, type or value."""
    hints = typing.get_type_hints(cls)
    settings = settings_of(cls)
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
        if not settings[key].allows(value):
            raise ConfigError(f"{where}.{key}: given {value!r}, allowed: {settings[key].allowed}")
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
    config = with_replaced(load_config(Path(path) if path else None), os.environ)
    return with_placement(config, os.environ.get(PLACEMENT_ENV, ""))


def with_replaced(config: Config, words: Mapping[str, str]) -> Config:
    """`config` with the settings that `words` give by a variable of REPLACING, if any. Raises ConfigError."""
    for variable, (table, name) in REPLACING.items():
        if word := words.get(variable, ""):
            values: Any = getattr(config, table)
            if not (setting := settings_of(type(values))[name]).allows(word):
                raise ConfigError(f"{variable}: given {word!r}, allowed: {setting.allowed}")
            config = dataclasses.replace(config, **{table: dataclasses.replace(values, **{name: word})})
    return config


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
