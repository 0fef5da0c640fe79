"""Starts the model `scheduler`: detokenizer, ports of the engines, service and reports, put together.

Engines are called first when a request comes: they may still be loading.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import triton_python_backend_utils as pb_utils

from ...config import DRAIN_KEY_ENV, SchedulerConfig, model_folder_from_environment
from ...contracts.requests import PriorityClass
from ...contracts.stream import LoadSnapshot
from ...model_facts.generation import sampling_defaults
from ...placement import SCHEDULER
from ...scheduler.service import SchedulerService
from ...telemetry.registry import Registry
from ...telemetry.tracing import SpanExporter
from ...tokenizer import TextStreams, TextTokenizer, load_tokenizer
from ..hops.bls_engine import BlsEngine
from ..hops.bls_tokenizer import BlsTokenizer
from ..hops.first_load import FirstLoad
from ..hops.inner_key import load_inner_key
from ..reports.observer import RequestObserver
from ..reports.publishing import scheduler_publisher
from ..reports.request_spans import RequestSpans
from ..reports.timed_text import TimedTextStreams
from ..request.decoder import ModelLimits
from ..request.dialects import EXCLUDE_INPUT, exclude_input
from ..stub_2_51.finished_calls import FinishedCalls
from ..stub_2_51.stream_gate import StreamGate
from .placing import place_process
from .process import Process, WatchedPlug
from .scheduler import SchedulerPlug
from .torchless import keep_torch_out

MAX_TOKEN_TEXTS = 1 << 16  # remembered: one costs 25 us, and a request may ask for 20 with every token


def start(process: Process) -> WatchedPlug:
    """Raises ConfigError."""
    model, config = model_folder_from_environment(), process.config
    keep_torch_out(model)
    place_process(SCHEDULER, config)
    with process.loading():
        # Encodes bad words only: nothing that a fast engine, and proving it equal at start-up, would be worth.
        tokenizer = load_tokenizer(model, dataclasses.replace(config.tokenizer, fast=False))

    names = [name.strip() for name in process.parameter("engines").split(",")]
    defaults = sampling_defaults(model) if config.scheduler.generation_config == "auto" else {}
    finished_calls, gate, key = FinishedCalls(), StreamGate(), load_inner_key()
    engines = [BlsEngine(name, key, finished_calls, gate) for name in names]
    first_load = FirstLoad(engines, config.scheduler.engine_answer_s)
    streams, telemetry, registry = tokenizer.streams(), config.telemetry, Registry()
    spans = RequestSpans(SpanExporter(telemetry.traces_url)) if telemetry.traces_url else None
    observer = RequestObserver(registry, pb_utils.Logger.log_info if telemetry.request_log else None, spans)
    publisher = scheduler_publisher(telemetry, observer, registry, spans)
    publisher.start()
    service = SchedulerService(
        engines,
        TimedTextStreams(streams, observer.detokenize) if telemetry.metrics else streams,
        config.scheduler,
        observer,
        in_round=process.busy("a round of the scheduling thread"),
        in_send=process.busy("a response on its way to Triton"),
    )
    plug = SchedulerPlug(
        service=service,
        tokenizer=BlsTokenizer(config.scheduler.max_queued_requests),
        limits=lambda: model_limits(
            first_load(), len(engines), tokenizer, config.scheduler, lambda ids: text_of(streams, ids), defaults
        ),
        token_text=lru_cache(MAX_TOKEN_TEXTS)(lambda token_id: text_of(streams, [token_id])),
        drain_timeout_s=config.scheduler.drain_timeout_s,
        refused=observer.finished,
        publisher=publisher,
        finished_calls=finished_calls,
        key=key,
        drain_key=os.environ.get(DRAIN_KEY_ENV, ""),
        send_times=observer.send if telemetry.metrics else None,
        gaps=observer.gap if telemetry.metrics else None,
        exclude_input=exclude_input(process.parameter(EXCLUDE_INPUT), config.scheduler.exclude_input_in_output),
        block_tokens=config.engine.block_tokens,
    )
    return process.watched(plug)


def model_limits(
    load: LoadSnapshot,
    engines: int,
    tokenizer: TextTokenizer,
    config: SchedulerConfig,
    spell: Callable[[Sequence[int]], str],
    defaults: Mapping[str, float],
) -> ModelLimits:
    """What requests are checked against. `load`: of the engine, or of one of several."""
    return ModelLimits(
        max_context_tokens=load.max_context_tokens,
        vocab_size=tokenizer.vocab_size,
        end_ids=tuple(tokenizer.end_ids),
        default_max_tokens=config.default_max_tokens,
        default_priority=PriorityClass[config.default_priority.upper()],
        default_deadline_s=config.default_deadline_s,
        encode_word=tokenizer.encode_word,
        spell=spell,
        control_ids=tokenizer.control_ids,
        sampling_defaults=defaults,
        max_sequences=load.max_sequences if engines == 1 else 0,
    )


def text_of(streams: TextStreams, ids: Sequence[int]) -> str:
    """Of tokens by themselves."""
    state = streams.open(np.empty(0, np.int32))
    [step] = streams.push([state], np.array(ids, np.int32), np.array([len(ids)], np.int32))
    return step.text + streams.flush(state)
