"""A real Triton server of the project, on free ports, with the demo model."""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path

import pytest
from tritandem.models.catalog import DEFAULT_MODEL
from tritandem.models.fetch import fetched
from tritandem.server import TritonServer

# A range for each of the processes that share the tests (gw0, gw1, ..).
PORTS = 100
FIRST_PORT = int(os.environ.get("TRITANDEM_TEST_FIRST_PORT", "18000"))
FIRST_PORT += PORTS * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))


def demo_model() -> Path:
    """TRITANDEM_TEST_MODEL, or what `tritandem model fetch` made; a folder that may not be there."""
    return Path(os.environ.get("TRITANDEM_TEST_MODEL") or fetched(DEFAULT_MODEL) or DEFAULT_MODEL)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on at this moment, drawn at random: the server binds them only when its models are
    loaded, and another test run on this machine may be choosing too."""
    found: list[int] = []
    for port in random.sample(range(FIRST_PORT, FIRST_PORT + PORTS), PORTS):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError(f"no {count} free ports in {FIRST_PORT}..{FIRST_PORT + PORTS - 1}")


def start_server(model: Path | None = None, **options: object) -> TritonServer:
    """Not yet entered. Without `model` the demo's; skips the test where there is none."""
    model = model or demo_model()
    if not (model / "config.json").is_file():
        pytest.skip(f"no demo model in {model}: run `tritandem model fetch smollm2` or set TRITANDEM_TEST_MODEL")
    http, grpc, metrics = free_ports(3)
    return TritonServer(model, http_port=http, grpc_port=grpc, metrics_port=metrics, ready_timeout_s=600.0, **options)
