"""What a running server holds: private memory of its processes by model, and its regions in /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path

from tritandem.server import TritonServer
from tritandem.server.health import stub_models

PROC, SHM = Path("/proc"), Path("/dev/shm")


def stub_pids(server_pid: int) -> dict[str, int]:
    """Model name -> process id of its Python stub; the last instance where there are several."""
    return {model: pid for pid, model in stub_models(server_pid).items()}


def private_mb(server: TritonServer) -> dict[str, float]:
    """Anonymous resident memory of tritonserver and of each stub."""
    return {name: _anonymous_mb(pid) for name, pid in {"tritonserver": server.pid, **stub_pids(server.pid)}.items()}


def shared_mb(server: TritonServer) -> float:
    """Bytes in use, not the sizes that sparse files claim."""
    return sum(os.stat(path).st_blocks * 512 for path in SHM.glob(f"{server.shm_prefix}*")) / 1e6


def _anonymous_mb(pid: int) -> float:
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    [anonymous_kb] = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(anonymous_kb) / 1e3
