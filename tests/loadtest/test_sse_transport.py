"""HTTP streams over kept connections: one that the server has hung up on fails no request."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tritandem_loadtest.dialects import DIALECTS
from tritandem_loadtest.transport.interface import Call
from tritandem_loadtest.transport.sse import SseTransport, TritonGenerate

EVENT = b'data: {"text_output": "a", "num_output_tokens": 1}\n\n'


@dataclass
class Visits:
    """What the server of one test has seen."""

    url: str = ""
    connections: int = 0
    keys: list[str | None] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)


class Impatient(BaseHTTPRequestHandler):
    """Answers with one event and keeps the connection for a moment only, without a word about it."""

    protocol_version = "HTTP/1.1"
    visits: Visits

    def setup(self) -> None:
        super().setup()
        self.visits.connections += 1

    def do_POST(self) -> None:
        self.visits.keys.append(self.headers["x-key"])
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(EVENT), EVENT))

    def finish(self) -> None:
        super().finish()
        self.connection.close()
        self.visits.hung_up.set()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def visits(request: pytest.FixtureRequest) -> Iterator[Visits]:
    """Of a server with so many seconds of patience."""

    class Handler(Impatient):
        visits = Visits()
        timeout = request.param

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        Handler.visits.url = f"127.0.0.1:{server.server_port}"
        yield Handler.visits
        server.shutdown()


@pytest.mark.parametrize(
    ("visits", "waits"),
    [(60.0, False), (0.2, True)],
    ids=["at once", "after the server has hung up"],
    indirect=["visits"],
)
def test_the_next_request_finds_a_connection(visits: Visits, waits: bool) -> None:
    endpoint = TritonGenerate(DIALECTS["tritandem"], "ensemble", False)
    transport = SseTransport(visits.url, endpoint, {"X-Key": "secret"})
    for number in range(2):
        exchange = transport.exchange(Call(str(number), "x", 1), 10.0)
        assert (exchange.outcome, exchange.error) == ("", "")
        assert transport.decode(exchange).tokens == [1]
        if waits and number == 0:
            assert visits.hung_up.wait(10)
    transport.close()
    assert (visits.connections, visits.keys) == (2 if waits else 1, ["secret", "secret"])
