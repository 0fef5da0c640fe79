"""Workers as processes: what they bring, how they start, drain and end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tritandem.front import protocol
from tritandem.host import Refusal
from tritandem.server.front_workers import FrontOptions, FrontWorkers, workers_for
from tritandem.server.options import ServeOptions

from tests.client.scripts import chunk, last, streaming
from tests.fakes.ports import free_ports
from tests.fakes.triton_grpc import FakeTritonGrpc
from tests.fakes.triton_protocol import Model, Received

BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}], "stream": True})


@contextmanager
def front(model: Model, log: Path, workers: int = 1, **options: Any) -> Iterator[tuple[FrontWorkers, int, list[str]]]:
    """A running front, its port, and what its owner was told."""
    [port] = free_ports(1)
    said: list[str] = []
    with FakeTritonGrpc(model) as server:
        owner = FrontWorkers(FrontOptions(("tiny",), workers=workers, **options), said.append)
        owner.start(ServeOptions(None, Path(), grpc_port=server.port, openai_port=port), log, frozenset({0}))
        try:
            yield owner, port, said
        finally:
            owner.kill()


def ask(port: int) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", "/v1/chat/completions", BODY, {"Connection": "close"})
    return connection.getresponse()


def test_a_worker_brings_neither_torch_nor_transformers() -> None:
    heavy = {"torch", "transformers", "triton", "tokenizers"}
    code = "import sys; from tritandem.front.worker import prompts_of; assert prompts_of(['a</think>'])"
    code = f"{code}; print(*{heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_workers_share_a_port_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    with front(streaming(), tmp_path / "log", workers=2) as (owner, port, said):
        assert ask(port).status == 200
        victim = owner._running[0]
        victim.kill()
        victim.wait()
        end_s = time.monotonic() + 20
        while not said:  # not at once, where it has only just been started
            owner.look_after()
            assert time.monotonic() < end_s
        assert "worker 0" in said[0]
        assert owner.pids()[0] != victim.pid
        assert ask(port).status == 200


def test_two_servers_do_not_share_a_port(tmp_path: Path) -> None:
    with front(streaming(), tmp_path / "log") as (_, port, said):
        other = FrontWorkers(FrontOptions(("other",), workers=1), said.append)
        with pytest.raises(Refusal, match=f"port {port} on 127.0.0.1 cannot be used"):
            other.start(ServeOptions(None, Path(), openai_port=port), tmp_path / "other", frozenset({0}))
        assert other.pids() == []


def test_a_drain_finishes_running_streams_and_then_the_worker_ends(tmp_path: Path) -> None:
    go_on = threading.Event()

    def model(request: Received) -> Any:
        yield chunk("a")
        assert go_on.wait(20)
        yield last()

    with front(model, tmp_path / "log") as (owner, port, said):
        running = ask(port)
        assert running.readline()
        owner.drain()
        end_s = time.monotonic() + 20
        while (late := ask(port)).status != 503:
            assert time.monotonic() < end_s
        assert json.load(late)["error"]["code"] == "draining"
        go_on.set()
        assert running.read().endswith(b"data: [DONE]\n\n")
        assert owner._running[0].wait(20) == 0
        owner.look_after()
        assert said == [], "it was meant to end"


def test_a_worker_does_not_outlive_its_parent(tmp_path: Path) -> None:
    [port] = free_ports(1)
    code = f"""
import time
from pathlib import Path
from tritandem.server.front_workers import FrontOptions, FrontWorkers
from tritandem.server.options import ServeOptions
workers = FrontWorkers(FrontOptions(("tiny",), workers=1), print)
workers.start(ServeOptions(None, Path(), openai_port={port}), Path({str(tmp_path / "log")!r}), frozenset({{0}}))
print(workers.pids()[0], flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    end_s = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() < end_s
        time.sleep(0.01)


def test_a_worker_that_cannot_start_is_a_refusal_that_names_the_log(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("no keys")
    with (
        pytest.raises(Refusal, match="log"),
        front(streaming(), tmp_path / "log", keys=tmp_path / "keys"),
    ):
        pass
    assert "--openai-keys" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (8, 2), (16, 4), (200, 8)])
def test_workers_go_by_cores(cores: int, workers: int) -> None:
    assert workers_for(cores) == workers


def test_headers_are_bounded_in_size_and_leave_others_undisturbed(tmp_path: Path) -> None:
    with front(streaming(), tmp_path / "log") as (_, port, _said):
        for sent in (b"POST / HTTP/1.1\r\nx: " + b"a" * 2 * protocol.MAX_HEADER_BYTES, b"\x16\x03 no HTTP\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", port), 10) as raw:
                raw.sendall(sent)
                with contextlib.suppress(ConnectionResetError):  # of one that went on sending
                    assert raw.recv(4096).startswith(b"HTTP/1.1 400 ")
                    assert raw.recv(4096) == b"", "closed"
        smuggled = (
            b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        )
        with socket.create_connection(("127.0.0.1", port), 10) as raw:
            raw.sendall(smuggled)
            assert raw.recv(4096).startswith(b"HTTP/1.1 4")
        assert ask(port).status == 200


def malformed(draw: random.Random) -> bytes:
    """A body that no request may have: wrong types, cut off, deep, not JSON, not UTF-8."""
    fields = ("messages", "n", "max_tokens", "temperature", "stop", "stream", "logprobs", "user", "tools", "model")
    values = ({}, [], "x", -1, 1e400, 2**70, True, [None], [[[]]], {"a": {"b": []}}, "\ud800")
    good = {"messages": [{"role": "user", "content": "hello"}]}
    text = json.dumps({**good, "messages": 1, **{draw.choice(fields): draw.choice(values) for _ in range(3)}})
    kind = draw.randrange(5)
    if kind == 0:
        return text[: draw.randrange(len(text))].encode()
    if kind == 1:
        return text.encode()[:-1] + bytes(draw.randrange(128, 256) for _ in range(4)) + b"}"
    if kind == 2:
        return b"[" * draw.randrange(1, 20_000)
    if kind == 3:
        return draw.randbytes(draw.randrange(200))
    return json.dumps({**good, "messages": draw.choice([v for v in values if v != [None]])}).encode()


def test_a_thousand_malformed_bodies_disturb_nobody_and_leave_nothing(tmp_path: Path) -> None:
    go_on = threading.Event()

    def model(request: Received) -> Any:
        yield chunk("a")
        assert go_on.wait(60)
        yield last()

    draw = random.Random(7)
    with front(model, tmp_path / "log") as (owner, port, _said):
        healthy = ask(port)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        statm = Path(f"/proc/{owner.pids()[0]}/statm")
        before = 0
        for number in range(1000):
            body = malformed(draw)
            connection.request("POST", "/v1/chat/completions", body)
            response = connection.getresponse()
            said = json.load(response)["error"]
            assert response.status == 400, body
            assert said["param"], body
            before = int(statm.read_text().split()[1]) if number == 100 else before
        grown_bytes = (int(statm.read_text().split()[1]) - before) * os.sysconf("SC_PAGE_SIZE")
        assert grown_bytes < 8 << 20
        connection.close()
        for cut in (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{", b"GET /v1"):
            with socket.create_connection(("127.0.0.1", port), 10) as raw:
                raw.sendall(cut)  # and goes
        go_on.set()
        assert healthy.read().endswith(b"data: [DONE]\n\n")


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_with_a_certificate_it_speaks_https(tmp_path: Path) -> None:
    chain, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(chain)]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    with front(streaming(), tmp_path / "log", tls=(chain, key)) as (_, port, _said):
        trusted = ssl.create_default_context(cafile=chain)
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=20, context=trusted)
        connection.request("POST", "/v1/chat/completions", BODY, {"Connection": "close"})
        assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")


def test_a_stopped_worker_is_killed_in_the_end(tmp_path: Path) -> None:
    with front(streaming(), tmp_path / "log") as (owner, _, _said):
        process = owner._running[0]
        os.kill(process.pid, signal.SIGSTOP)
        owner.drain()
        owner.stop()
        assert process.poll() is not None
