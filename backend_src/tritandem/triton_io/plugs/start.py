"""Builds what stands behind each model when Triton initialises it: configuration, services, log.

The only place where the plugs meet the rooms below. Runs on the stub's main thread; a model is ready, and
with it the server, when its function returns.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import triton_python_backend_utils as pb_utils

from ...config import (
    DRAIN_KEY_ENV,
    SchedulerConfig,
    TokenizerConfig,
    config_from_environment,
    heartbeat_from_environment,
    model_folder_from_environment,
)
from ...contracts.printable import MAX_TRACEBACK_CHARS, printable
from ...contracts.requests import PriorityClass
from ...contracts.stream import EnginePort, LoadSnapshot
from ...placement import ENGINE, SCHEDULER, TOKENIZER
from ...telemetry.heartbeat import Heartbeat
from ..hops.inner_key import load_inner_key
from ..request.decoder import ModelLimits
from ..stub_2_51.leaving import leave_without_teardown
from .context_limit import most_prompt_tokens
from .placing import place_engine, place_process, plan_engine
from .torchless import keep_torch_out
from .watched import WatchedPlug

if TYPE_CHECKING:
    from ...tokenizer import TextStreams, TextTokenizer

MAX_TOKEN_TEXTS = 1 << 16  # remembered: one costs 25 us, and a request may ask for 20 with every token


def start_tokenizer(args: Mapping[str, str]) -> WatchedPlug:
    """Raises ConfigError."""
    heartbeat = begin()
    log_to_triton()
    model, config = model_folder_from_environment(), config_from_environment()
    keep_torch_out(model)
    place_process(TOKENIZER, config)

    tokenizer = load_watched(model, config.tokenizer, heartbeat, config.watch.load_s)

    from ...telemetry.registry import Registry
    from ..reports.publishing import tokenizer_publisher
    from ..reports.tokenizer_report import TokenizerReport
    from .tokenizer import TokenizerPlug

    name, registry = args["model_instance_name"], Registry()
    report = TokenizerReport(registry, name, tokenizer.stats)
    publisher = tokenizer_publisher(config.telemetry, report, registry, name)
    publisher.start()
    note = report.note if config.telemetry.metrics else None
    most_waiting = config.scheduler.max_queued_requests
    most_tokens = most_prompt_tokens(model, config.engine)
    plug = TokenizerPlug(tokenizer, load_inner_key(), most_tokens, note, publisher, most_waiting)
    return WatchedPlug(plug, heartbeat.busy("a call of Triton's", config.watch.call_s))


def start_engine(args: Mapping[str, str]) -> WatchedPlug:
    """Loads the model and runs it once, with progress in the log. Raises ConfigError."""
    heartbeat = begin()
    from ...engine.service import build_engine
    from ...telemetry.step_meter import StepMeter
    from ..reports.publishing import engine_publisher
    from .engine import EnginePlug

    log_to_triton()
    settings, key = config_from_environment(), load_inner_key()
    device = model_parameter(args, "device") or settings.engine.device
    plan = plan_engine(settings, device)
    threads = settings.engine.threads or plan.shares[ENGINE].threads
    config = dataclasses.replace(settings.engine, device=device, threads=threads)
    name = args["model_name"]
    meter = StepMeter(name)
    service = build_engine(
        model_folder_from_environment(),
        config,
        lambda message: pb_utils.Logger.log_info(f"{name}: {message}"),
        meter if settings.telemetry.metrics else None,
        heartbeat.busy("a step on the device", settings.watch.step_s),
    )
    place_engine(plan)
    publisher = engine_publisher(settings.telemetry, meter)
    publisher.start()
    plug = EnginePlug(service, config.stream_idle_s, key, publisher)
    return WatchedPlug(plug, heartbeat.busy("a call of Triton's", settings.watch.call_s))


def start_engine_calls(args: Mapping[str, str]) -> WatchedPlug:
    """Raises ConfigError."""
    heartbeat = begin()
    from .engine_calls import CallRelay

    limit_s = config_from_environment().watch.call_s
    relay = CallRelay(args["model_name"], load_inner_key())
    return WatchedPlug(relay, heartbeat.busy("a call of Triton's", limit_s))


def start_scheduler(args: Mapping[str, str]) -> WatchedPlug:
    """Raises ConfigError. Engines are called first when a request comes: they may still be loading."""
    heartbeat = begin()
    log_to_triton()
    model, config = model_folder_from_environment(), config_from_environment()
    keep_torch_out(model)
    place_process(SCHEDULER, config)

    # Encodes bad words only: nothing that a fast engine, and proving it equal at start-up, would be worth.
    slow = dataclasses.replace(config.tokenizer, fast=False)
    tokenizer = load_watched(model, slow, heartbeat, config.watch.load_s)

    from ...scheduler.service import SchedulerService
    from ...telemetry.registry import Registry
    from ...telemetry.tracing import SpanExporter
    from ..hops.bls_engine import BlsEngine
    from ..hops.bls_tokenizer import BlsTokenizer
    from ..hops.first_load import FirstLoad
    from ..reports.observer import RequestObserver
    from ..reports.publishing import scheduler_publisher
    from ..reports.request_spans import RequestSpans
    from ..reports.timed_text import TimedTextStreams
    from ..stub_2_51.finished_calls import FinishedCalls
    from ..stub_2_51.stream_gate import StreamGate
    from .scheduler import SchedulerPlug

    names = [name.strip() for name in model_parameter(args, "engines").split(",")]
    finished_calls, gate = FinishedCalls(), StreamGate()
    key = load_inner_key()
    engines: list[EnginePort] = [BlsEngine(name, key, finished_calls, gate) for name in names]
    first_load = FirstLoad(engines, config.scheduler.engine_answer_s)
    streams = tokenizer.streams()
    registry = Registry()
    telemetry = config.telemetry
    spans = RequestSpans(SpanExporter(telemetry.traces_url)) if telemetry.traces_url else None
    observer = RequestObserver(registry, pb_utils.Logger.log_info if telemetry.request_log else None, spans)
    publisher = scheduler_publisher(telemetry, observer, registry, spans)
    publisher.start()
    text = TimedTextStreams(streams, observer.detokenize) if telemetry.metrics else streams
    limit_s = config.watch.call_s
    service = SchedulerService(
        engines,
        text,
        config.scheduler,
        observer,
        in_round=heartbeat.busy("a round of the scheduling thread", limit_s),
        in_send=heartbeat.busy("a response on its way to Triton", limit_s),
    )
    plug = SchedulerPlug(
        service,
        BlsTokenizer(config.scheduler.max_queued_requests),
        lambda: model_limits(first_load(), tokenizer, config.scheduler),
        lru_cache(MAX_TOKEN_TEXTS)(lambda token_id: token_text(streams, token_id)),
        config.scheduler.drain_timeout_s,
        observer.finished,
        publisher,
        finished_calls,
        key,
        os.environ.get(DRAIN_KEY_ENV, ""),
        observer.send if telemetry.metrics else None,
    )
    return WatchedPlug(plug, heartbeat.busy("a call of Triton's", limit_s))


def begin() -> Heartbeat:
    """Before all else, so that a process is watched, and ends with its server, while it still loads."""
    leave_without_teardown()
    return Heartbeat(heartbeat_from_environment())


def load_watched(model: Path, config: TokenizerConfig, heartbeat: Heartbeat, limit_s: float) -> TextTokenizer:
    """A load, its imports included, that outlasts the limit is seen from outside. Raises ConfigError."""
    with heartbeat.busy("loading", limit_s):
        from ...tokenizer import load_tokenizer

        return load_tokenizer(model, config)


def model_limits(load: LoadSnapshot, tokenizer: TextTokenizer, config: SchedulerConfig) -> ModelLimits:
    """What requests are checked against."""
    return ModelLimits(
        max_context_tokens=load.max_context_tokens,
        vocab_size=tokenizer.vocab_size,
        end_ids=tuple(tokenizer.end_ids),
        default_max_tokens=config.default_max_tokens,
        default_priority=PriorityClass[config.default_priority.upper()],
        default_deadline_s=config.default_deadline_s,
        encode_word=tokenizer.encode_word,
    )


def token_text(streams: TextStreams, token_id: int) -> str:
    """One token by itself, for log-probabilities."""
    state = streams.open(np.empty(0, np.int32))
    [step] = streams.push([state], np.array([token_id], np.int32), np.ones(1, np.int32))
    return step.text + streams.flush(state)


def model_parameter(args: Mapping[str, str], name: str) -> str:
    """A parameter of config.pbtxt, "" when it is not there."""
    parameters = json.loads(args["model_config"]).get("parameters", {})
    value: str = parameters.get(name, {}).get("string_value", "")
    return value


class _TritonHandler(logging.Handler):
    """Python's log records into Triton's log."""

    def emit(self, record: logging.LogRecord) -> None:
        text = printable(self.format(record), MAX_TRACEBACK_CHARS, lines=True)
        if record.levelno >= logging.ERROR:
            pb_utils.Logger.log_error(text)
        elif record.levelno >= logging.WARNING:
            pb_utils.Logger.log_warn(text)
        else:
            pb_utils.Logger.log_info(text)


def log_to_triton() -> None:
    """Everything that the rooms log, from INFO on, appears in the server's log."""
    logger = logging.getLogger("tritandem")
    if not logger.handlers:
        handler = _TritonHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
