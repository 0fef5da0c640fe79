"""A Triton installation that holds the fake binary, so that starting and stopping takes milliseconds."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tritandem.server import TritonServer, preflight
from tritandem.server.locate import TritonInstall

from tests.fakes.ports import free_ports

FAKE_BINARY = Path(__file__).resolve().parents[1] / "fakes" / "triton_binary" / "tritonserver.py"


@pytest.fixture
def fake_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TritonInstall:
    """What `find_install` finds during the test."""
    root = tmp_path / "triton"
    binary = root / "bin" / "tritonserver"
    binary.parent.mkdir(parents=True)
    binary.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "{FAKE_BINARY}" "$@"\n')
    binary.chmod(0o755)
    install = TritonInstall(binary, root / "backends", root / "caches", root / "stub", (), False, False)
    monkeypatch.setattr(preflight, "find_install", lambda: install)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return install


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """The smallest model repository that passes the checks."""
    folder = tmp_path / "repository" / "echo"
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text('backend: "python"\n')
    return folder.parent


MakeServer = Callable[..., TritonServer]


@pytest.fixture
def make_server(fake_install: TritonInstall, repository: Path) -> Iterator[MakeServer]:
    """`make_server(behaviour, **options)`: a server over the fake binary, not started; killed after the test."""
    made: list[TritonServer] = []

    def make(behaviour: dict[str, object] | None = None, **options: object) -> TritonServer:
        http, grpc, metrics = free_ports(3)
        environment = {**os.environ, "FAKE_TRITON": json.dumps(behaviour or {})}
        server = TritonServer(
            repository=repository, environment=environment, http_port=http, grpc_port=grpc, metrics_port=metrics,
            **options,
        )  # fmt: skip
        made.append(server)
        return server

    yield make
    for server in made:
        server.kill()
