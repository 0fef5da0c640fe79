"""The gRPC transport over `h2`: flow control, limits and farewells of a server, TLS, lost peers, its slow twin."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gevent
import grpc
import pytest
from hyperframe.frame import GoAwayFrame, RstStreamFrame, SettingsFrame, WindowUpdateFrame
from hypothesis import given
from hypothesis import strategies as st
from tritandem_loadtest import RunConfig, run
from tritandem_loadtest.stamps import TIMEOUT, UNREACHABLE
from tritandem_loadtest.transport.connect import connect
from tritandem_loadtest.transport.h2_connection import GrpcStream
from tritandem_loadtest.transport.interface import Call, Exchange, Transport

from tests.fakes.scripted_grpc_server import TIMEOUT_S, Peer, ScriptedServer

Engine = dict[str, str]
CANCEL = 8  # error code of RST_STREAM


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_messages_come_out_whole_however_the_bytes_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(b"\0" + len(message).to_bytes(4, "big") + message for message in messages)
    stream = GrpcStream(1)
    at = 0
    for cut in [*cuts, len(data)]:
        stream.take(data[at : at + cut], at)
        at += cut
    assert [payload for _, payload in stream.messages] == messages


@pytest.fixture(params=["raw_grpc", "grpc"])
def transport(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Transport]:
    """The `h2` client against the cheap server and against grpcio's."""
    client = connect(RunConfig(url=engine[request.param], connections=1))
    yield client
    client.close()


def test_a_prompt_larger_than_every_window_arrives_whole(transport: Transport) -> None:
    words = 60_000
    exchange = transport.exchange(Call("lt-0-1", "word " * words, 2), timeout_s=20.0)
    decoded = transport.decode(exchange)
    assert (exchange.outcome, exchange.error) == ("", "")
    assert (decoded.input_tokens, decoded.tokens) == (words, [1, 1])


def test_the_server_stamps_and_counts_of_the_last_response_are_read(transport: Transport) -> None:
    decoded = transport.decode(transport.exchange(Call("lt-0-1", "hello", 3), timeout_s=10.0))
    assert decoded.cached_tokens == 7
    steps = {"tokenize", "queue", "engine queue", "prefill", "decode", "first send", "last wait"}
    assert set(decoded.server) == {*steps, "whole"}
    assert decoded.server["prefill"] == pytest.approx(30 + 40 * 37 / 100, abs=40)
    assert decoded.arrived_ns == sorted(decoded.arrived_ns)


def test_an_error_response_keeps_the_servers_words(transport: Transport) -> None:
    exchange = transport.exchange(Call("lt-0-1", "FAIL EXPIRED: too late", 3), timeout_s=10.0)
    assert transport.decode(exchange).error == "EXPIRED: too late"


def test_a_stream_that_outlasts_the_timeout_is_cancelled_and_the_connection_lives_on(transport: Transport) -> None:
    late = transport.exchange(Call("lt-0-1", "hello", 100_000), timeout_s=0.3)
    assert late.outcome == TIMEOUT
    again = transport.exchange(Call("lt-0-2", "hello", 2), timeout_s=10.0)
    assert transport.decode(again).tokens == [1, 1]


def test_nobody_listening_is_unreachable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client = connect(RunConfig(url=f"127.0.0.1:{unused.getsockname()[1]}"))
        assert client.exchange(Call("lt-0-1", "hello", 2), timeout_s=5.0).outcome == UNREACHABLE


def test_a_server_that_hangs_up_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            peer, _ = listener.accept()
            peer.recv(24)
            peer.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        client = connect(RunConfig(url=f"127.0.0.1:{listener.getsockname()[1]}"))
        result = client.exchange(Call("lt-0-1", "hello", 2), timeout_s=5.0)
        thread.join(5)
    assert result.outcome == UNREACHABLE
    assert result.error


def exchanges_at_once(client: Transport, count: int) -> list[Exchange]:
    """`count` requests in flight together."""
    call = Call("lt-0-1", "hello", 2)
    running = [gevent.spawn(client.exchange, call, 5.0) for _ in range(count)]
    gevent.joinall(running, raise_error=True)
    return [greenlet.value for greenlet in running]


def test_a_server_that_announces_its_end_still_finishes_its_stream_and_gets_no_other() -> None:
    def script(peer: Peer) -> None:
        peer.settle({})
        stream_id = peer.wait_for_request()
        peer.begin(stream_id)
        peer.send(GoAwayFrame(last_stream_id=stream_id))
        peer.answer(stream_id, b"after the farewell")
        peer.finish(stream_id)

    with ScriptedServer(script, connections=2) as server:
        client = connect(RunConfig(url=server.url, connections=1))
        for _ in range(2):
            exchange = client.exchange(Call("lt-0-1", "hello", 2), timeout_s=5.0)
            assert (exchange.outcome, [m for _, m in exchange.messages]) == ("", [b"after the farewell"])
        client.close()


def test_streams_that_a_farewell_left_out_are_unreachable() -> None:
    def script(peer: Peer) -> None:
        peer.settle({})
        peer.wait_for_request()
        peer.wait_for_request()
        peer.begin(1)
        peer.send(GoAwayFrame(last_stream_id=1, error_code=2))
        peer.finish(1)

    with ScriptedServer(script, connections=1) as server:
        client = connect(RunConfig(url=server.url, connections=1))
        first, second = exchanges_at_once(client, 2)
        client.close()
    assert (first.outcome, second.outcome) == ("", UNREACHABLE)
    assert second.error == "the server is going away (code 2)"


def test_streams_beyond_the_servers_limit_travel_on_another_connection() -> None:
    both_connections_have_a_request = threading.Barrier(2)

    def script(peer: Peer) -> None:
        peer.settle({SettingsFrame.MAX_CONCURRENT_STREAMS: 1})
        stream_id = peer.wait_for_request()
        both_connections_have_a_request.wait(TIMEOUT_S)
        peer.begin(stream_id)
        peer.finish(stream_id)

    with ScriptedServer(script, connections=2) as server:
        client = connect(RunConfig(url=server.url, connections=1))
        assert [exchange.outcome for exchange in exchanges_at_once(client, 2)] == ["", ""]
        client.close()


def test_giving_up_a_stream_tells_the_server() -> None:
    def script(peer: Peer) -> None:
        peer.settle({})
        stream_id = peer.wait_for_request()
        reset = peer.wait_for(RstStreamFrame)
        assert isinstance(reset, RstStreamFrame)
        assert (reset.stream_id, reset.error_code) == (stream_id, CANCEL)

    with ScriptedServer(script, connections=1) as server:
        client = connect(RunConfig(url=server.url, connections=1))
        assert client.exchange(Call("lt-0-1", "hello", 2), timeout_s=0.1).outcome == TIMEOUT
        client.close()


def test_a_server_that_lets_nothing_in_ends_in_a_timeout() -> None:
    def script(peer: Peer) -> None:
        peer.settle({SettingsFrame.INITIAL_WINDOW_SIZE: 10})
        peer.wait_for(RstStreamFrame)

    with ScriptedServer(script, connections=1) as server:
        client = connect(RunConfig(url=server.url, connections=1))
        assert client.exchange(Call("lt-0-1", "hello", 2), timeout_s=0.1).outcome == TIMEOUT
        client.close()


def test_windows_are_granted_again_before_a_long_answer_fills_them() -> None:
    """Counted by the server, which stops when it may not send: 40 MiB do not fit into the stream's first window."""
    message, count, first_window = b"x" * 16_000, 2_600, 2**24

    def script(peer: Peer) -> None:
        peer.settle({})
        stream_id = peer.wait_for_request()
        peer.begin(stream_id)
        allowed = first_window
        for _ in range(count):
            while allowed < len(message) + 5:
                update = peer.wait_for(WindowUpdateFrame)
                assert isinstance(update, WindowUpdateFrame)
                allowed += update.window_increment if update.stream_id == stream_id else 0
            allowed -= len(message) + 5
            peer.answer(stream_id, message)
        peer.finish(stream_id)

    with ScriptedServer(script, connections=1) as server:
        client = connect(RunConfig(url=server.url, connections=1))
        exchange = client.exchange(Call("lt-0-1", "hello", 2), timeout_s=20.0)
        client.close()
    assert (exchange.outcome, len(exchange.messages)) == ("", count)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_tls_works_with_a_certificate_that_the_system_trusts_and_with_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "server.key", tmp_path / "server.crt"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    words += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    echo = grpc.stream_stream_rpc_method_handler(lambda requests, context: requests)
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", {"ModelStreamInfer": echo})
    server = grpc.server(ThreadPoolExecutor(2), handlers=(service,))
    credentials = grpc.ssl_server_credentials([(key.read_bytes(), certificate.read_bytes())])
    port = server.add_secure_port("localhost:0", credentials)
    server.start()
    call = Call("lt-0-1", "hello", 2)
    for trusted in (False, True):
        if trusted:
            monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        client = connect(RunConfig(url=f"grpcs://localhost:{port}", connections=1))
        exchange = client.exchange(call, timeout_s=5.0)
        client.close()
        assert (exchange.outcome, len(exchange.messages)) == (("", 1) if trusted else (UNREACHABLE, 0))
        assert trusted or "certificate verify failed" in exchange.error
    server.stop(None).wait(10)


def test_grpcio_and_h2_report_the_same_answers(engine: Engine) -> None:
    """The slow twin: same requests, same token counts by request, same server stages."""
    common = {"url": engine["grpc"], "rps": 40.0, "duration_s": 0.5, "output_tokens": "uniform:1-9"}
    reports = [run(RunConfig(**common, grpc_client=client)) for client in ("h2", "grpcio")]  # type: ignore[arg-type]
    answers = [
        [(r.index, r.outcome, r.tokens, r.input_tokens, r.cached_tokens, sorted(r.server)) for r in report.records]
        for report in reports
    ]
    assert len(answers[0]) == 20
    assert answers[0] == answers[1]


@pytest.mark.parametrize("protocol", ["http", "openai"])
def test_http_streams_carry_the_same_counts(engine: Engine, protocol: str) -> None:
    http = connect(RunConfig(url=engine["http"], protocol=protocol))
    for _ in range(2):  # the second uses the kept connection
        exchange = http.exchange(Call("lt-0-1", "three little words", 4), timeout_s=10.0)
        decoded = http.decode(exchange)
        assert (exchange.outcome, decoded.error) == ("", "")
        assert (decoded.tokens, decoded.input_tokens) == ([1, 1, 1, 1], 3)
    failed = http.exchange(Call("lt-0-1", "FAIL EXPIRED: too late", 4), timeout_s=10.0)
    assert (failed.outcome, failed.error) == ("EXPIRED", "EXPIRED: too late")
    http.close()
