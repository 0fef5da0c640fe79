"""Where Triton's own threads run, and what its model processes are told about placement."""

from __future__ import annotations

from ..config import load_config, with_placement
from ..placement import SERVER, another_server_on, plan_here
from .options import ServeOptions

OFF = "off"


def place_server(options: ServeOptions) -> tuple[frozenset[int], str]:
    """(CPUs of the server's threads, words for its model processes; "": what the configuration says).

    Two servers that both took the first cores would be in each other's way: the later one stays unpinned. Raises
    ConfigError.
    """
    config = with_placement(load_config(options.engine_config), options.placement)
    plan = plan_here(config, options.devices[0].first if options.devices else None)
    cpus = plan.cpus_of(SERVER)
    if config.placement.policy == "auto" and plan.dedicated and another_server_on(cpus):
        return plan_here(with_placement(config, OFF)).cpus_of(SERVER), OFF
    return cpus, options.placement
