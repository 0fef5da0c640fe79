"""Is a running server well: its readiness endpoint, and whether every model's stub process is alive.

Triton 2.51 goes on answering `ready` after a decoupled model's stub was killed, so the processes themselves are
looked at as well.
"""

from __future__ import annotations

import http.client
from pathlib import Path

from ..machine.processes import PROC, children, command_line, state
from .guardian import STUB_NAME

READY_PATH = "/v2/health/ready"


def ready(host: str, port: int, timeout_s: float = 5.0) -> bool:
    """True when the server answers that it and all its models are ready."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", READY_PATH)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def stub_models(server_pid: int, proc: Path = PROC) -> dict[int, str]:
    """Model name by process id of each Python stub that runs; ended but unreaped ones do not count."""
    return {pid: model for pid in children(server_pid, proc) if (model := _model_of(pid, proc)) is not None}


def is_stopped(pid: int) -> bool:
    """By a signal, until another one comes; one that a debugger holds is not meant."""
    return state(pid) == "T"


def _model_of(pid: int, proc: Path) -> str | None:
    """None: no live stub. The first argument of one is MODEL/VERSION/model.py."""
    words = command_line(pid, proc)
    if len(words) < 2 or STUB_NAME not in words[0] or state(pid, proc) in "ZX":
        return None
    return Path(words[1]).parent.parent.name
