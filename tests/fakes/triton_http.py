"""A Triton HTTP server in this process: health, repository index and the two generate endpoints.

As strict as its gRPC sibling, and as peculiar as Triton: the status of the first response is the status of
the whole, errors in an event stream come as `data: {"error": ...}`, `generate` demands one response, and a
request has no id but the one among its parameters.
"""

from __future__ import annotations

import contextlib
import json
import re
import select
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.fakes.triton_protocol import MANY_VALUES, ONE_VALUE, PARAMETERS, FakeTriton, Model, Outputs, Received

PYTHON_TYPES = {"BYTES": str, "BOOL": bool, "FP32": (int, float)}  # all others: int


class FakeTritonHttp(FakeTriton):
    """`with FakeTritonHttp(model) as server:` listens on `server.url`; `server.visitors` knows who came."""

    protocol = "http"

    def __init__(self, model: Model, *, port: int = 0) -> None:
        super().__init__(model)
        self.connections: list[Any] = []
        owner = self

        class Handler(_Handler):
            server_of_test = owner

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.block_on_close = False
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self.url = f"127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def die(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        for connection in self.connections:
            _cut(connection)
        self._thread.join()

    def __enter__(self) -> FakeTritonHttp:
        self._thread.start()
        return self


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of_test: FakeTritonHttp

    def log_message(self, *args: object) -> None:
        pass

    def setup(self) -> None:
        super().setup()
        self.server_of_test.connections.append(self.connection)

    def do_GET(self) -> None:
        model = re.fullmatch(r"/v2/models/(\w+)/ready", self.path)
        if model:
            state, _ = self.server_of_test.models.get(model[1], ("", ""))
            return self._plain(200 if state == "READY" else 400, b"")
        assert self.path == "/v2/health/ready", self.path
        self._plain(200 if self.server_of_test.ready else 400, b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == "/v2/repository/index" and self.server_of_test.index_closed:
            return self._plain(403, b'{"error": "This API is restricted"}')
        if self.path == "/v2/repository/index":
            entries = self.server_of_test.models.items()
            index = [{"name": name, "version": "1", "state": s, "reason": r} for name, (s, r) in entries]
            return self._plain(200, json.dumps(index).encode())
        try:
            kind, request = self._read(json.loads(body))
        except BaseException as fault:
            self.server_of_test.visitors.faults.append(fault)
            raise
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(self.connection, request.gone, done))
        watcher.start()
        try:
            self._answer(kind, self.server_of_test.visitors.admit(request))
        except OSError:
            request.gone.set()
            self.close_connection = True
        finally:
            done.set()
            watcher.join()

    def _read(self, body: dict[str, Any]) -> tuple[str, Received]:
        route = re.fullmatch(r"/v2/models/(\w+)/(generate|generate_stream)", self.path)
        assert route, f"unexpected path {self.path}"
        inputs, parameters = {}, {}
        for name, value in body.items():
            if name in PARAMETERS or name == "request_id":
                parameters[name] = value
            elif name in ONE_VALUE:
                assert isinstance(value, PYTHON_TYPES.get(ONE_VALUE[name], int)), f"{name}={value!r}"
                inputs[name] = [value]
            else:
                assert name in MANY_VALUES, f"unexpected key {name}"
                assert isinstance(value, list), f"{name}={value!r}"
                inputs[name] = value
        assert (route[2] == "generate_stream") == ("stream" in inputs), "the endpoint and the input `stream` agree"
        request_id = parameters.pop("request_id")
        assert isinstance(request_id, str), f"request_id={request_id!r}"
        assert request_id, "request_id is empty"
        return route[2], Received(route[1], request_id, inputs, parameters, dict(self.headers))

    def _answer(self, kind: str, said: Iterator[Outputs | Exception | None]) -> None:
        documents = (_document(one) for one in said if one is not None)
        first = next(documents, None)
        if first is None:  # its client has gone before a word was said
            self.close_connection = True
            return
        status, document = first
        if kind == "generate":
            assert next(documents, None) is None, "generate expects model to produce exactly 1 response"
            return self._plain(status, document)
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(b"data: " + document + b"\n\n")
        for _, document in documents:
            self._chunk(b"data: " + document + b"\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        # Two writes, the first ending within the data: readers must put pieces together.
        whole = b"%x\r\n%b\r\n" % (len(data), data)
        middle = len(whole) // 2
        self.wfile.write(whole[:middle])
        self.wfile.write(whole[middle:])

    def _plain(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _document(said: Outputs | Exception) -> tuple[int, bytes]:
    if isinstance(said, Exception):
        return 400, json.dumps({"error": str(said)}).encode()
    values = {name: v[0] if len(v) == 1 else v for name, (_, v) in said.items()}
    document = {"model_name": "fake", "model_version": "1", **values}
    return 200, json.dumps(document, ensure_ascii=False).encode()  # raw UTF-8, as Triton writes it


def _watch(connection: Any, gone: threading.Event, done: threading.Event) -> None:
    """Set `gone` when the peer closes while its request runs."""
    while not done.is_set():
        try:
            readable, _, _ = select.select([connection], [], [], 0.01)
            if readable and not connection.recv(1, 2):  # MSG_PEEK
                return gone.set()
        except (OSError, ValueError):
            return gone.set()


def _cut(connection: Any) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(2)
