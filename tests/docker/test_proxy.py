"""The TLS recipe, run as it stands in a real nginx: keys are asked for, and only inference passes.

Two stand-ins for Triton behind it, HTTP and gRPC, tell what reached them.
"""

from __future__ import annotations

import gzip
import http.client
import re
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritandem.server.health import READY_PATH

from tests.debian_program import debian_program
from tests.docker.deployment_files import DOCKER
from tests.fakes.ports import free_ports

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
KEY, TRUSTED_KEY = "Bearer replace-me", "Bearer replace-me-too"  # of keys.map.example
GENERATE = "/v2/models/ensemble/generate"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


@dataclass
class Proxy:
    port: int
    certificate: bytes
    seen: list[tuple[str, str | None]] = field(default_factory=list)  # path, Authorization that reached Triton
    bodies: list[bytes] = field(default_factory=list)
    kinds: list[str | None] = field(default_factory=list)  # Content-Type that reached Triton

    def ask(self, method: str, path: str, key: str | None = KEY, body: bytes = b"", **headers: str) -> int:
        """The status of one HTTPS request."""
        context = ssl.create_default_context(cadata=self.certificate.decode())
        connection = http.client.HTTPSConnection("localhost", self.port, timeout=20, context=context)
        try:
            connection.request(method, path, body, headers | ({"Authorization": key} if key else {}))
            return connection.getresponse().status
        finally:
            connection.close()

    def stream(self, method: str, messages: list[bytes], key: str | None = TRUSTED_KEY) -> list[bytes]:
        """The answers of one gRPC stream. Raises grpc.RpcError."""
        credentials = grpc.ssl_channel_credentials(self.certificate)
        with grpc.secure_channel(f"localhost:{self.port}", credentials) as channel:
            call = channel.stream_stream(method)
            metadata = (("authorization", key),) if key else ()
            return list(call(iter(messages), metadata=metadata, timeout=20))


def http_stand_in(port: int, found: Proxy) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            found.bodies.append(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            found.seen.append((self.path, self.headers.get("Authorization")))
            found.kinds.append(self.headers.get("Content-Type"))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing on the terminal."""

    for method in ("GET", "POST"):
        setattr(Handler, f"do_{method}", Handler.answer)
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class EchoEverything(grpc.GenericRpcHandler):
    def __init__(self, seen: list[tuple[str, str | None]]) -> None:
        self._seen = seen

    def service(self, details: Any) -> Any:
        self._seen.append((details.method, dict(details.invocation_metadata).get("authorization")))
        return grpc.stream_stream_rpc_method_handler(lambda requests, context: (b"echo " + r for r in requests))


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    program = debian_program("nginx")
    modules = Path(program).parents[1] / "lib/nginx/modules"
    if not (modules / "ngx_http_js_module.so").is_file():
        pytest.skip(f"nginx has no module njs in {modules} (Debian package libnginx-mod-http-js)")
    folder = tmp_path_factory.mktemp("nginx")
    (folder / "certificates").mkdir()
    key, certificate = folder / "certificates/server.key", folder / "certificates/server.crt"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    shutil.copy(DOCKER / "proxy/keys.map.example", folder / "keys.map")
    shutil.copy(DOCKER / "proxy/body_check.js", folder)
    port, http_port, grpc_port = free_ports(3)
    text = (DOCKER / "proxy/nginx.conf").read_text()
    for old, new in (
        ("load_module modules", f"load_module {modules}"),
        ("server:8000", f"127.0.0.1:{http_port}"),
        ("server:8001", f"127.0.0.1:{grpc_port}"),
        ("listen 8443", f"listen 127.0.0.1:{port}"),
        ("worker_processes auto", "worker_processes 1"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(re.sub(r"/tmp/nginx", f"{folder}/nginx", text))
    found = Proxy(port, certificate.read_bytes())
    server = http_stand_in(http_port, found)
    echo = grpc.server(ThreadPoolExecutor(4), handlers=(EchoEverything(found.seen),))
    echo.add_insecure_port(f"127.0.0.1:{grpc_port}")
    echo.start()
    nginx = subprocess.Popen(
        [program, "-e", "stderr", "-c", str(folder / "nginx.conf"), "-g", "daemon off;"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        wait_until_listening(nginx, port)
        yield found
    finally:
        nginx.terminate()
        nginx.wait(20)
        assert nginx.stderr is not None
        nginx.stderr.close()
        echo.stop(None).wait(20)
        server.shutdown()
        server.server_close()


def wait_until_listening(process: subprocess.Popen[bytes], port: int) -> None:
    pause = threading.Event()
    for _ in range(400):
        assert process.poll() is None, process.stderr and process.stderr.read()
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        pause.wait(0.05)
    raise AssertionError("nginx does not listen")


def test_readiness_needs_no_key(proxy: Proxy) -> None:
    assert proxy.ask("GET", READY_PATH, key=None) == 200


@pytest.mark.parametrize("path", ["/v2/models/ensemble/generate", "/v2/models/scheduler/versions/1/generate_stream"])
def test_inference_needs_a_key_which_stays_outside(proxy: Proxy, path: str) -> None:
    for wrong in (None, "Bearer wrong", "replace-me", KEY + "x"):
        assert proxy.ask("POST", path, key=wrong, body=b"{}") == 401
    proxy.seen.clear()
    assert proxy.ask("POST", path, body=b"{}") == 200
    assert proxy.seen == [(path, None)]


@pytest.mark.parametrize(
    "path",
    [
        "/v2/repository/index",
        "/v2/repository/models/engine/unload",
        "/v2/systemsharedmemory/status",
        "/v2/cudasharedmemory/region/x/register",
        "/v2/trace/setting",
        "/v2/logging",
        "/v2/models/engine/infer",
        "/v2/models/tokenizer/generate",
        "/metrics",
    ],
)
def test_what_administers_triton_does_not_exist_outside(proxy: Proxy, path: str) -> None:
    proxy.seen.clear()
    assert proxy.ask("POST", path, body=b"{}") == 404
    assert proxy.seen == []


def test_bodies_are_limited(proxy: Proxy) -> None:
    proxy.seen.clear()
    assert proxy.ask("POST", GENERATE, body=b"x" * (5 << 20)) == 413
    assert proxy.seen == []


DEEP = {
    "200 kB of brackets": b"[" * 200_000,
    "objects": b'{"a":' * 257,
    "lists after a string": b'{"text_input": "a", "x": ' + b"[" * 257,
    "after a string that ends with a backslash": rb'{"a": "\\", "x": ' + b"[" * 257,
    "after a broken character that would hide a quote": b'{"a": "\xc3", "x": ' + b"[" * 257,
    "in an object without an end of its string": b"[" * 257 + b'"',
}


@pytest.mark.parametrize("body", DEEP.values(), ids=DEEP)
def test_a_body_that_would_end_tritons_process_does_not_reach_it(proxy: Proxy, body: bytes) -> None:
    proxy.seen.clear()
    assert proxy.ask("POST", GENERATE, body=body) == 400
    assert proxy.seen == []


FLAT = {
    "nothing": b"",
    "as many brackets as are allowed": b"[" * 256,
    "brackets in a text": b'{"text_input": "' + rb"[{\"" * 500_000 + b'", "max_tokens": 4}',
    "brackets after an escaped quote": rb'{"text_input": "\"' + b"[" * 1000 + b'"}',
    "a long text of several bytes a character": b'{"text_input": "' + "日本[".encode() * 300_000 + b'"}',
}


@pytest.mark.parametrize("body", FLAT.values(), ids=FLAT)
def test_other_bodies_arrive_as_they_were_sent(proxy: Proxy, body: bytes) -> None:
    proxy.bodies.clear()
    assert proxy.ask("POST", GENERATE, body=body) == 200
    assert proxy.bodies == [body]


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "application/json"])
def test_triton_never_hears_of_a_form(proxy: Proxy, kind: str | None) -> None:
    proxy.kinds.clear()
    assert proxy.ask("POST", GENERATE, body=b"{}", **({"Content-Type": kind} if kind else {})) == 200
    assert proxy.kinds == ["application/json"]


def test_a_body_that_cannot_be_looked_at_is_refused(proxy: Proxy) -> None:
    proxy.seen.clear()
    assert proxy.ask("POST", GENERATE, body=gzip.compress(b"[" * 200_000), **{"Content-Encoding": "gzip"}) == 415
    assert proxy.seen == []


def test_a_grpc_stream_passes_with_a_trusted_key(proxy: Proxy) -> None:
    proxy.seen.clear()
    assert proxy.stream(STREAM, [b"one", b"two"]) == [b"echo one", b"echo two"]
    [(method, key)] = proxy.seen
    assert method == STREAM
    assert not key


@pytest.mark.parametrize(
    ("method", "key", "code"),
    [
        (STREAM, None, grpc.StatusCode.UNAUTHENTICATED),
        (STREAM, "Bearer wrong", grpc.StatusCode.UNAUTHENTICATED),
        (STREAM, KEY, grpc.StatusCode.PERMISSION_DENIED),
        ("/inference.GRPCInferenceService/RepositoryModelUnload", TRUSTED_KEY, grpc.StatusCode.UNIMPLEMENTED),
        ("/inference.GRPCInferenceService/SystemSharedMemoryRegister", TRUSTED_KEY, grpc.StatusCode.UNIMPLEMENTED),
        ("/inference.GRPCInferenceService/ModelInfer", TRUSTED_KEY, grpc.StatusCode.UNIMPLEMENTED),
    ],
)
def test_other_grpc_calls_do_not(proxy: Proxy, method: str, key: str | None, code: grpc.StatusCode) -> None:
    proxy.seen.clear()
    with pytest.raises(grpc.RpcError) as refused:
        proxy.stream(method, [b"x"], key)
    # nginx answers at once and resets the stream; if that overtakes the answer, gRPC reports INTERNAL.
    assert refused.value.code() in (code, grpc.StatusCode.INTERNAL)
    assert proxy.seen == []


def test_plain_text_is_not_spoken(proxy: Proxy) -> None:
    connection = http.client.HTTPConnection("localhost", proxy.port, timeout=20)
    connection.request("GET", READY_PATH)
    assert connection.getresponse().status == 400
    connection.close()
