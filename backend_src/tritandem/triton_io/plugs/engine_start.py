"""Starts the model `engine`: loads the weights, runs the model once, pins the thread that launches steps.

Beside the plug, because it brings torch.
"""

from __future__ import annotations

import dataclasses

import triton_python_backend_utils as pb_utils

from ...config import model_folder_from_environment
from ...engine.model.loader import resolve_device
from ...engine.service import CORE_THREAD, build_engine
from ...grammar import Vocabulary
from ...machine.device import DeviceGroup
from ...placement import ENGINE, plan_here, settle
from ...telemetry.step_meter import StepMeter
from ...tokenizer.files.source import read_source
from ..hops.inner_key import load_inner_key
from ..reports.publishing import engine_publisher
from ..stub_2_51.leaving import leave_broken
from .engine import EnginePlug
from .placing import place_engine
from .process import Process, WatchedPlug


def start(process: Process) -> WatchedPlug:
    """With progress in the log. Raises ConfigError."""
    settings, name = process.config, process.args["model_name"]
    key = load_inner_key()
    device = process.parameter("device") or settings.engine.device
    on_gpu = resolve_device(device).type == "cuda"
    plan = plan_here(settings, DeviceGroup.parse(device).first, on_gpu)
    settle(plan.home)  # any core near the GPU while it loads, and its memory with it; said once, when it is final
    threads = settings.engine.threads or plan.shares[ENGINE].threads
    config = dataclasses.replace(settings.engine, device=device, threads=threads)
    meter = StepMeter(name)
    model = model_folder_from_environment()

    def open_vocabulary(rows: int) -> Vocabulary:
        source = read_source(model)
        return Vocabulary(source.json_text, rows, source.end_ids)

    service = build_engine(
        model,
        config,
        lambda message: pb_utils.Logger.log_info(f"{name}: {message}"),
        meter=meter if settings.telemetry.metrics else None,
        in_step=process.busy("a step on the device", settings.watch.step_s),
        open_vocabulary=open_vocabulary,
        on_broken=lambda reason: leave_broken(lambda: service.live() == 0),
    )
    place_engine(plan, launching=CORE_THREAD)
    publisher = engine_publisher(settings.telemetry, meter)
    publisher.start()
    return process.watched(EnginePlug(service, config.stream_idle_s, key, publisher))
