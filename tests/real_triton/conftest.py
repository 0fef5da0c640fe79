"""One real Triton server with the demo model for all tests of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritandem.server import TritonServer

sys.path.insert(0, str(Path(__file__).resolve().parent))

from raw_client import RawClient
from started import start_server


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    with start_server() as running:
        yield running


@pytest.fixture
def client(server: TritonServer) -> Iterator[RawClient]:
    with RawClient(server.grpc_url, server.pid) as connected:
        yield connected
