"""What a server does without being told: it answers this machine only, administration nobody, and its inner models
only each other."""

from __future__ import annotations

import http.client
import json
import os
import socket
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritandem.server import TritonServer
from tritandem.server.health import ready

from tests.real_triton.raw_client import RawClient, in_background, number, text

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


VICTIMS, TOKENS = 4, 16
THIEVES: list[tuple[str, str, dict[str, Any]]] = [
    ("engine", "generate_stream", {"header": [3, 0]}),
    ("engine", "generate_stream", {"header": [0, 0, 3, 0]}),
    ("engine", "generate", {"header": [2, 3000, *range(1, 3001)]}),
    ("engine", "generate", {"header": [1, 1, *range(1, 18)], "tokens": [1]}),
    ("engine_calls", "generate", {"header": [2, 3000, *range(1, 3001)], "engine": "engine"}),
    ("engine_calls", "generate", {"header": [4, 0], "engine": "engine_calls"}),
]


def post(server: TritonServer, model: str, call: str, body: dict[str, Any], timeout_s: float = 60) -> str:
    """The error that a body is answered with."""
    connection = http.client.HTTPConnection(server.http_url, timeout=timeout_s)
    try:
        connection.request("POST", f"/v2/models/{model}/{call}", json.dumps(body))
        answer = connection.getresponse().read().removeprefix(b"data:").strip()
    finally:
        connection.close()
    return str(json.loads(answer)["error"])


def test_strangers_get_nothing_out_of_the_inner_models_and_disturb_nobody(
    server: TritonServer, client: RawClient
) -> None:
    def answer(victim: int) -> str:
        arrays = {"text_input": text(f"Count from {victim}: {victim},"), "max_tokens": number(TOKENS, np.int32)}
        return client.answer("scheduler", arrays | {"sampling_parameters": text('{"ignore_eos": true}')})

    alone = [answer(victim) for victim in range(VICTIMS)]
    over, refusals = threading.Event(), list[str]()

    def steal() -> None:
        while not over.is_set():
            refusals.extend(post(server, *thief) for thief in THIEVES)

    thief, failure = in_background(steal)
    victims = [in_background(answer, victim) for victim in range(VICTIMS)]
    for thread, _ in victims:
        thread.join()
    over.set()
    thief.join()
    assert [outcome for _, [outcome] in victims] == alone
    assert failure == [None]
    assert len(refusals) >= len(THIEVES)
    assert {refusal.partition(",")[0] for refusal in refusals} == {
        "REJECTED_INVALID: header: given 'a call without the key of this server'"
    }


FORGED: dict[str, dict[str, Any]] = {
    "an endless refusal": {"refusal": "REJECTED_INVALID: : given " * 8000},
    "a megabyte": {"refusal": "x" * 1_000_000},
    "an early arrival": {"text_input": "a", "input_ids": [1], "tokenized_ns": [1, 2, 3, 0, 0], "refusal": ""},
    "stamps alone": {"text_input": "a", "tokenized_ns": [1, 2, 3, 0, 0]},
}


@pytest.mark.parametrize("name", FORGED)
def test_nobody_can_pose_as_the_tokenizer(server: TritonServer, client: RawClient, name: str) -> None:
    begun_s = time.monotonic()
    message = post(server, "scheduler", "generate", FORGED[name])
    assert client.answer("scheduler", {"text_input": text("Hi"), "max_tokens": number(1, np.int32)})
    assert time.monotonic() - begun_s < 60, "others waited for a refusal"
    assert message.startswith(("REJECTED_INVALID: tokenized_ns: given", "REJECTED_INVALID: refusal: given"))
    assert len(message) < 500


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
