"""What a server does without being told: it answers this machine only, and administration nobody."""

from __future__ import annotations

import http.client
import os
import socket
from pathlib import Path

import pytest
from tritandem.server import TritonServer
from tritandem.server.health import ready

pytestmark = pytest.mark.triton

LISTEN = "0A"
# 127.0.0.1 as the kernel writes it, by itself and inside an IPv6 address.
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
ADMINISTRATION = [
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/engine/unload"),
    ("POST", "/v2/repository/models/engine/load"),
    ("GET", "/v2/systemsharedmemory/status"),
    ("POST", "/v2/systemsharedmemory/region/stolen/register"),
    ("POST", "/v2/cudasharedmemory/region/stolen/register"),
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/models/engine/trace/setting"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
]


def listening_addresses(pid: int) -> set[str]:
    """Local addresses of the sockets that a process listens on, as /proc/net/tcp and tcp6 have them."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor))
        except FileNotFoundError:  # closed meanwhile
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == LISTEN and f"socket:[{rest[5]}]" in inodes:
                found.add(local)
    return found


def status(server: TritonServer, method: str, path: str) -> int:
    connection = http.client.HTTPConnection(server.http_url, timeout=20)
    try:
        connection.request(method, path, b"{}" if method == "POST" else None)
        return connection.getresponse().status
    finally:
        connection.close()


def test_every_port_answers_this_machine_only(server: TritonServer) -> None:
    ports = {f"{port:04X}" for port in server.options.ports().values()}
    addresses = listening_addresses(server.pid)
    assert {address.rpartition(":")[2] for address in addresses} == ports
    assert {address.rpartition(":")[0] for address in addresses} <= LOOPBACK


@pytest.mark.parametrize(("method", "path"), ADMINISTRATION)
def test_administration_over_http_is_refused(server: TritonServer, method: str, path: str) -> None:
    assert status(server, method, path) == 403


def test_administration_has_no_key_that_can_be_guessed(server: TritonServer) -> None:
    words = Path(f"/proc/{server.pid}/cmdline").read_bytes().decode().split("\0")
    keys = {word.rpartition("=")[2] for word in words if "restricted" in word}
    assert len(keys) == 1
    assert len(keys.pop()) >= 32


def test_endless_headers_end_with_their_connection(server: TritonServer) -> None:
    """The sender loses its connection or its patience; the server goes on."""
    with socket.create_connection((server.options.client_host, server.options.http_port), timeout=10) as connection:
        try:
            connection.sendall(b"GET /v2/health/ready HTTP/1.1\r\nHost: x\r\nX-Long: ")
            for _ in range(64):
                connection.sendall(b"a" * 65536)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(4096)
        except (ConnectionError, TimeoutError):
            answer = b""
    assert b" 200 " not in answer.partition(b"\r\n")[0]
    assert ready(server.options.client_host, server.options.http_port)
