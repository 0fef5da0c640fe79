"""Is a running server well: its readiness endpoint, and whether every model's stub process is alive.

Triton 2.51 goes on answering `ready` after a decoupled model's stub was killed, so the processes themselves are
looked at as well.
"""

from __future__ import annotations

import http.client
from pathlib import Path

from .locate import STUB_NAME

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


def live_stubs(server_pid: int, proc: Path = Path("/proc")) -> int:
    """How many Python stubs of this server run; ended but unreaped ones do not count."""
    count = 0
    for task in (proc / str(server_pid) / "task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:  # that thread has just ended
            continue
        count += sum(_is_live_stub(proc / pid) for pid in children)
    return count


def _is_live_stub(process: Path) -> bool:
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX" and STUB_NAME.encode() in (process / "cmdline").read_bytes().split(b"\0")[0]
    except OSError:
        return False
