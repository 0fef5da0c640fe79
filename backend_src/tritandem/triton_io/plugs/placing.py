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


def place_engine(plan: Plan, launching: str) -> None:
    """When the model is loaded; `launching` names the thread that launches steps. Threads that start later inherit the
    mask of the one that starts them."""
    if _settle(plan, ENGINE) and plan.cpus_of(ENGINE_HOST) != plan.cpus_of(ENGINE):
        for thread in threading.enumerate():
            if thread.name == launching and thread.native_id is not None:
                pin_thread(plan.cpus_of(ENGINE_HOST), thread.native_id)
        _log.info("%s %s", launching, plan.describe(ENGINE_HOST))


def _settle(plan: Plan, component: str) -> bool:
    problem = settle(plan.cpus_of(component))
    if problem:
        _log.warning("%s %s", component, problem)
        return False
    _log.info("%s runs %s", component, plan.describe(component))
    return True
