"""The own HTTP/2 client: header compression by RFC examples, flow control, lost peers, agreement with grpcio."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritandem_loadtest import RunConfig, run
from tritandem_loadtest.stamps import TIMEOUT, UNREACHABLE
from tritandem_loadtest.transport import hpack
from tritandem_loadtest.transport.connect import connect
from tritandem_loadtest.transport.http2 import Http2Stream
from tritandem_loadtest.transport.interface import Call, Transport

Engine = dict[str, str]


@pytest.mark.parametrize(("value", "bits", "octets"), [(10, 5, [10]), (1337, 5, [31, 154, 10]), (42, 8, [42])])
def test_integers_are_those_of_rfc_7541_c_1(value: int, bits: int, octets: list[int]) -> None:
    assert list(hpack.encode_integer(value, bits)) == octets
    assert hpack.decode_integer(bytes(octets), 0, bits) == (value, len(octets))


def test_requests_of_rfc_7541_c_3_decode_with_one_dynamic_table() -> None:
    decoder = hpack.Decoder()
    first = bytes.fromhex("828684410f7777772e6578616d706c652e636f6d")
    second = bytes.fromhex("828684be58086e6f2d6361636865")
    third = bytes.fromhex("828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565")
    base = {":method": "GET", ":scheme": "http", ":path": "/", ":authority": "www.example.com"}
    assert decoder.decode(first) == base
    assert decoder.decode(second) == {**base, "cache-control": "no-cache"}
    custom = {":scheme": "https", ":path": "/index.html", "custom-key": "custom-value"}
    assert decoder.decode(third) == {**base, **custom}


def test_a_small_table_forgets_the_oldest_entries() -> None:
    decoder = hpack.Decoder(max_table_bytes=80)  # room for two entries of 32 + 4 octets
    for name in ("aa", "bb", "cc"):
        decoder.decode(b"\x40\x02" + name.encode() + b"\x02" + name.encode())
    assert decoder.decode(b"\xbe") == {"cc": "cc"}
    assert decoder.decode(b"\xbf") == {"bb": "bb"}
    with pytest.raises(IndexError):
        decoder.decode(b"\xc0")


def test_huffman_coded_headers_are_refused_by_name() -> None:
    with pytest.raises(hpack.HuffmanRefused):
        hpack.Decoder().decode(bytes.fromhex("418cf1e3c2e5f23a6ba0ab90f4ff"))


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_messages_come_out_whole_however_the_bytes_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    data = b"".join(b"\0" + len(message).to_bytes(4, "big") + message for message in messages)
    stream = Http2Stream(1, 65535)
    at = 0
    for cut in [*cuts, len(data)]:
        stream.take(data[at : at + cut], at)
        at += cut
    assert [payload for _, payload in stream.messages] == messages


@pytest.fixture(params=["raw_grpc", "grpc"])
def transport(request: pytest.FixtureRequest, engine: Engine) -> Iterator[Transport]:
    """The wire client against the cheap server and against grpcio's."""
    wire = connect(RunConfig(url=engine[request.param], connections=1))
    yield wire
    wire.close()


def test_a_prompt_larger_than_every_window_arrives_whole(transport: Transport) -> None:
    words = 60_000
    exchange = transport.exchange(Call("lt-0-1", "word " * words, 2), timeout_s=20.0)
    decoded = transport.decode(exchange)
    assert (exchange.outcome, exchange.error) == ("", "")
    assert (decoded.input_tokens, decoded.tokens) == (words, [1, 1])


def test_the_server_stamps_and_counts_of_the_last_response_are_read(transport: Transport) -> None:
    decoded = transport.decode(transport.exchange(Call("lt-0-1", "hello", 3), timeout_s=10.0))
    assert decoded.cached_tokens == 7
    assert set(decoded.server) == {"tokenize", "queue", "engine queue", "prefill", "decode", "first send"}
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
        wire = connect(RunConfig(url=f"127.0.0.1:{unused.getsockname()[1]}"))
        assert wire.exchange(Call("lt-0-1", "hello", 2), timeout_s=5.0).outcome == UNREACHABLE


def test_a_server_that_hangs_up_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            peer, _ = listener.accept()
            peer.recv(24)
            peer.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        wire = connect(RunConfig(url=f"127.0.0.1:{listener.getsockname()[1]}"))
        result = wire.exchange(Call("lt-0-1", "hello", 2), timeout_s=5.0)
        thread.join(5)
    assert result.outcome == UNREACHABLE
    assert result.error


def test_grpcio_and_the_wire_client_report_the_same_answers(engine: Engine) -> None:
    """The slow twin: same requests, same token counts by request, same server stages."""
    common = {"url": engine["grpc"], "rps": 40.0, "duration_s": 0.5, "output_tokens": "uniform:1-9"}
    reports = [run(RunConfig(**common, grpc_client=client)) for client in ("wire", "grpcio")]  # type: ignore[arg-type]
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
