"""One real Triton server with the demo model for all tests of this folder; one for each process that shares them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tritandem.server import TritonServer

from tests.real_triton.raw_client import RawClient
from tests.real_triton.started import start_server


@pytest.fixture(scope="session")
def server() -> Iterator[TritonServer]:
    with start_server() as running:
        yield running


@pytest.fixture
def client(server: TritonServer) -> Iterator[RawClient]:
    with RawClient(server.grpc_url, server.pid) as connected:
        yield connected
