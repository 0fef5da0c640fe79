"""HTTP streams over kept connections: one that the server has hung up on fails no request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tritandem_loadtest.dialects import DIALECTS
from tritandem_loadtest.transport.interface import Call
from tritandem_loadtest.transport.sse import SseTransport, TritonGenerate

EVENT = b'data: {"text_output": "a", "num_output_tokens": 1}\n\n'


class Impatient(BaseHTTPRequestHandler):
    """Answers with one event and keeps the connection for a moment only, without a word about it."""

    protocol_version = "HTTP/1.1"
    timeout = 0.2
    hung_up = threading.Event()
    connections = 0

    def setup(self) -> None:
        super().setup()
        Impatient.connections += 1

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENT), EVENT))

    def finish(self) -> None:
        super().finish()
        self.connection.close()
        self.hung_up.set()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Impatient.hung_up.clear()
    Impatient.connections = 0
    with ThreadingHTTPServer(("127.0.0.1", 0), Impatient) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after the server has hung up"])
def test_the_next_request_finds_a_connection(waits: bool, url: str) -> None:
    transport = SseTransport(url, TritonGenerate(DIALECTS["tritandem"], "ensemble", False))
    for number in range(2):
        exchange = transport.exchange(Call(str(number), "x", 1), 10.0)
        assert (exchange.outcome, exchange.error) == ("", "")
        assert transport.decode(exchange).tokens == [1]
        if waits and number == 0:
            assert Impatient.hung_up.wait(10)
    transport.close()
    assert Impatient.connections == (2 if waits else 1)
