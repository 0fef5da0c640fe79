"""The recipes of docs/security.md that need no proxy, on the real binary: TLS on gRPC, and a key for inference."""

from __future__ import annotations

import http.client
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritandem.server import TritonServer
from tritandem.server.command import RESTRICTED_APIS

from tests.fakes.ports import free_ports

pytestmark = [
    pytest.mark.triton,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed"),
]
SECRET = "a-secret"
CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
ECHO = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", text)]) for text in texts]
"""


@dataclass(frozen=True)
class Guarded:
    server: TritonServer
    certificate: Path

    def echo(self, headers: dict[str, str] | None, tls: bool = True) -> bytes:
        """One gRPC inference. Raises InferenceServerException."""
        import tritonclient.grpc as triton

        roots = str(self.certificate) if tls else None
        address = self.server.grpc_url.replace("127.0.0.1", "localhost")
        with triton.InferenceServerClient(address, ssl=tls, root_certificates=roots) as client:
            text = triton.InferInput("TEXT", [1], "BYTES")
            text.set_data_from_numpy(np.array([b"hello"], dtype=object))
            answer: Any = client.infer("echo", [text], headers=headers, client_timeout=20).as_numpy("TEXT")
        return bytes(answer[0])

    def generate(self, headers: dict[str, str]) -> int:
        connection = http.client.HTTPConnection(self.server.http_url, timeout=20)
        try:
            connection.request("POST", "/v2/models/echo/generate", b'{"TEXT": "hello"}', headers)
            return connection.getresponse().status
        finally:
            connection.close()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    model = folder / "repository" / "echo"
    (model / "1").mkdir(parents=True)
    (model / "config.pbtxt").write_text(CONFIG)
    (model / "1" / "model.py").write_text(ECHO)
    key, certificate = folder / "server.key", folder / "server.crt"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    apis = f"inference,{RESTRICTED_APIS}:api-key={SECRET}"
    http_port, grpc_port, metrics_port = free_ports(3)
    with TritonServer(
        repository=model.parent,
        http_port=http_port,
        grpc_port=grpc_port,
        metrics_port=metrics_port,
        log_path=folder / "triton.log",
        extra_flags=(
            "--grpc-use-ssl=true",
            f"--grpc-server-cert={certificate}",
            f"--grpc-server-key={key}",
            f"--grpc-restricted-protocol={apis}",
            f"--http-restricted-api={apis}",
        ),
    ) as server:
        yield Guarded(server, certificate)


def test_grpc_inference_needs_tls_and_the_key_in_tritons_own_header(guarded: Guarded) -> None:
    from tritonclient.utils import InferenceServerException

    assert guarded.echo({"triton-grpc-protocol-api-key": SECRET}) == b"hello"
    for headers in (None, {"api-key": SECRET}, {"triton-grpc-protocol-api-key": "wrong"}):
        with pytest.raises(InferenceServerException, match="restricted"):
            guarded.echo(headers)
    with pytest.raises(InferenceServerException):
        guarded.echo({"triton-grpc-protocol-api-key": SECRET}, tls=False)


def test_http_inference_needs_the_key_in_a_header_of_that_name(guarded: Guarded) -> None:
    assert guarded.generate({"api-key": SECRET}) == 200
    assert guarded.generate({}) == 403
    assert guarded.generate({"api-key": "wrong"}) == 403
