"""TCP ports on this machine: free or busy."""

from __future__ import annotations

import socket
from contextlib import ExitStack

from .options import LOOPBACK


def why_not_bindable(host: str, port: int) -> str | None:
    """None when a server could listen on host:port now, else the system's words."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: connections of a former server that linger in TIME_WAIT are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except (OSError, OverflowError) as error:
            return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return None


def free_ports(count: int) -> list[int]:
    """`count` different loopback ports that nothing listens on now; somebody else may take one at any moment."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind((LOOPBACK, 0))
        return [int(probe.getsockname()[1]) for probe in probes]
