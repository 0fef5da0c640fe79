"""What a running server holds: private memory of its processes by model, and its regions in /dev/shm."""

from __future__ import annotations

import os
from pathlib import Path

from tritandem.server import TritonServer

PROC, SHM = Path("/proc"), Path("/dev/shm")


def stub_pids(server: TritonServer) -> dict[str, int]:
    """Model name -> process id of its Python stub; the first instance where there are several."""
    pids: dict[str, int] = {}
    for task in (PROC / str(server.pid) / "task").glob("*/children"):
        for pid in map(int, task.read_text().split()):
            words = (PROC / str(pid) / "cmdline").read_bytes().decode().split("\0")
            if Path(words[0]).name == "triton_python_backend_stub":
                pids.setdefault(Path(words[1]).parents[1].name, pid)
    return pids


def private_mb(server: TritonServer) -> dict[str, float]:
    """Anonymous resident memory of tritonserver and of each stub."""
    return {name: _anonymous_mb(pid) for name, pid in {"tritonserver": server.pid, **stub_pids(server)}.items()}


def shared_mb(server: TritonServer) -> float:
    """Bytes in use, not the sizes that sparse files claim."""
    return sum(os.stat(path).st_blocks * 512 for path in SHM.glob(f"{server.shm_prefix}*")) / 1e6


def _anonymous_mb(pid: int) -> float:
    lines = (PROC / str(pid) / "status").read_text().splitlines()
    [anonymous_kb] = [line.split()[1] for line in lines if line.startswith("RssAnon:")]
    return int(anonymous_kb) / 1e3
