"""A model's process takes its place: its own CPUs, and as many library threads as it may use.

Before the libraries are loaded where that is possible: OpenMP and Rayon size their pools then. The small relay
`engine_calls` stays with the server, whose mask it inherits.
"""

from __future__ import annotations

import logging
import os
import threading

from ...config import Config
from ...placement import ENGINE, ENGINE_HOST, Plan, limit_library_threads, pin_thread, plan_here, settle

_log = logging.getLogger("tritandem.placement")  # whose plan it carries out


def place_process(component: str, config: Config) -> None:
    """Of the tokenizer and the scheduler. Raises ConfigError."""
    plan = plan_here(config)
    limit_library_threads(os.environ, plan.shares[component].threads)
    _settle(plan, component)


def plan_engine(config: Config, device: str) -> Plan:
    """Also moves this process to where it may load: any core near the GPU, and its memory with it.

    Raises ConfigError.
    """
    from ...engine.model.loader import resolve_device

    plan = plan_here(config, device, on_gpu=resolve_device(device).type == "cuda")
    settle(plan.home)  # said once, when it is final
    return plan


def place_engine(plan: Plan) -> None:
    """When the model is loaded. Threads that start later inherit the mask of the one that starts them."""
    from ...engine.service import CORE_THREAD  # in here, for it brings torch into a process

    if _settle(plan, ENGINE) and plan.cpus_of(ENGINE_HOST) != plan.cpus_of(ENGINE):
        for thread in threading.enumerate():
            if thread.name == CORE_THREAD and thread.native_id is not None:
                pin_thread(plan.cpus_of(ENGINE_HOST), thread.native_id)
        _log.info("%s %s", CORE_THREAD, plan.describe(ENGINE_HOST))


def _settle(plan: Plan, component: str) -> bool:
    problem = settle(plan.cpus_of(component))
    if problem:
        _log.warning("%s %s", component, problem)
        return False
    _log.info("%s runs %s", component, plan.describe(component))
    return True
