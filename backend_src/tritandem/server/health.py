"""Is a running server well: its readiness endpoint, and whether every model's stub process is alive.

Triton 2.51 goes on answering `ready` after a decoupled model's stub was killed, so the processes themselves are
looked at as well.
"""

from __future__ import annotations

import http.client
from pathlib import Path

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


def stub_models(server_pid: int, proc: Path = Path("/proc")) -> dict[int, str]:
    """Model name by process id of each Python stub that runs; ended but unreaped ones do not count."""
    models: dict[int, str] = {}
    for task in (proc / str(server_pid) / "task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # that thread has just ended
            continue
        models |= {int(pid): model for pid in children if (model := _model_of(proc / pid)) is not None}
    return models


def is_stopped(pid: int, proc: Path = Path("/proc")) -> bool:
    """By a signal, until another one comes; one that a debugger holds is not meant."""
    return _state(proc / str(pid)) == "T"


def live_stubs(server_pid: int) -> int:
    """How many Python stubs of this server run."""
    return len(stub_models(server_pid))


def _model_of(process: Path) -> str | None:
    """None: no live stub. The first argument of one is MODEL/VERSION/model.py."""
    try:
        program, *words = (process / "cmdline").read_bytes().decode().split("\0")
    except OSError:
        return None
    if _state(process) in "ZX" or STUB_NAME not in program:
        return None
    return Path(words[0]).parent.parent.name


def _state(process: Path) -> str:
    """The kernel's letter; X: there is none any more."""
    try:
        return (process / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"
