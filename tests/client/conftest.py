"""Scripted models and, for every behaviour, the four ways to reach them: threads and asyncio, gRPC and HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tritandem_client import Client

from tests.client.blocking import BlockingAsyncClient
from tests.fakes.triton_grpc import FakeTritonGrpc
from tests.fakes.triton_http import FakeTritonHttp
from tests.fakes.triton_protocol import Model

SERVERS = {"grpc": FakeTritonGrpc, "http": FakeTritonHttp}
WAYS = [("sync", "grpc"), ("sync", "http"), ("asyncio", "grpc"), ("asyncio", "http")]


class Way:
    """One way to talk to a server: starts the server that fits, makes clients of it, closes both afterwards."""

    def __init__(self, style: str, protocol: str, stack: ExitStack) -> None:
        self.style, self.protocol, self._stack = style, protocol, stack

    def serve(self, script: Model, /, **arguments: Any) -> Any:
        return self._stack.enter_context(SERVERS[self.protocol](script, **arguments))

    def client(self, url: str, **settings: Any) -> Any:
        kind = Client if self.style == "sync" else BlockingAsyncClient
        return self._stack.enter_context(kind(url, protocol=self.protocol, **{"timeout_s": 30.0, **settings}))

    def connect(self, script: Model, /, **settings: Any) -> tuple[Any, Any]:
        server = self.serve(script)
        return server, self.client(server.url, **settings)


@pytest.fixture(params=WAYS, ids="-".join)
def way(request: pytest.FixtureRequest) -> Iterator[Way]:
    with ExitStack() as stack:
        yield Way(*request.param, stack)


@pytest.fixture(params=["grpc", "http"])
def sync_way(request: pytest.FixtureRequest) -> Iterator[Way]:
    with ExitStack() as stack:
        yield Way("sync", request.param, stack)
