"""Every failure arrives as one typed exception, exactly once."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from typing import Any

import pytest
from tritandem_client import (
    Cancelled,
    Client,
    ConnectionFailed,
    DeadlineExpired,
    Failed,
    InvalidRequest,
    Saturated,
    ServerNotReady,
    Stopped,
    Timeout,
)
from tritandem_client.transports.http_wire import from_status

from tests.client.scripts import chunk, hanging, last, saying, streaming
from tests.fakes.triton_grpc import FakeTritonGrpc

SERVER_WORDS = [
    ("EXPIRED: the deadline of 5 ms passed", DeadlineExpired, "EXPIRED"),
    ("CANCELLED: the client went away", Cancelled, "CANCELLED"),
    ("STOPPED: by a stop request", Stopped, "STOPPED"),
    ("FAILED: the engine broke", Failed, "FAILED"),
    ("REJECTED_SATURATED: 64 waiting; retry after 2.5 s", Saturated, "REJECTED_SATURATED"),
    ("REJECTED_INVALID: top_p: given 7.0, allowed: a number in (0, 1]", InvalidRequest, "REJECTED_INVALID"),
]


@pytest.mark.parametrize(("text", "kind", "outcome"), SERVER_WORDS)
def test_the_servers_outcome_word_decides_the_class(text: str, kind: Any, outcome: str, way: Any) -> None:
    _, client = way.connect(saying(RuntimeError(text)))
    for ask in (client.generate, lambda prompt: list(client.stream(prompt))):
        with pytest.raises(kind) as caught:
            ask("x")
        assert caught.value.outcome == outcome
        assert str(caught.value) == text.partition(": ")[2]
        assert caught.value.request_id


def test_an_error_in_mid_stream_comes_once_and_tells_what_had_arrived(way: Any) -> None:
    _, client = way.connect(saying(chunk("half "), RuntimeError("FAILED: the engine broke")))
    stream = client.stream("x")
    assert next(stream).text == "half "
    with pytest.raises(Failed) as caught:
        next(stream)
    assert caught.value.partial_text == "half "
    assert next(stream, None) is None
    with pytest.raises(RuntimeError, match="failed"):
        _ = stream.result


def test_a_dying_server_is_a_failed_connection_once(way: Any) -> None:
    server, client = way.connect(hanging(chunk("a")))
    stream = client.stream("x")
    next(stream)
    server.die()
    with pytest.raises(ConnectionFailed):
        next(stream)
    assert next(stream, None) is None


def test_a_refused_connection_says_so_at_once(way: Any) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening
        client = way.client(f"127.0.0.1:{unused.getsockname()[1]}")
        began_s = time.monotonic()
        with pytest.raises(ConnectionFailed):
            client.generate("x")
        health = client.health()
        assert (health.live, health.ready) == (False, False)
        assert health.reason
        assert time.monotonic() - began_s < 5


def test_a_server_that_comes_back_is_found_again(way: Any) -> None:
    first = way.serve(streaming())
    client = way.client(first.url)
    assert client.generate("x").text == "Paris."
    first.die()
    with pytest.raises(ConnectionFailed):
        client.generate("x")
    way.serve(streaming(["back"]), port=first.port)
    client.wait_ready(10)
    assert client.generate("x").text == "back"


def test_silence_beyond_the_timeout_is_a_timeout(way: Any) -> None:
    server, client = way.connect(hanging())
    with pytest.raises(Timeout):
        client.generate("x", timeout_s=0.2)
    assert server.visitors.requests[0].gone.wait(10), "the server learns that nobody waits any more"


def test_a_slow_trickle_does_not_outlive_the_timeout(way: Any) -> None:
    def model(request: Any) -> Any:
        while not request.gone.wait(0.02):
            yield chunk(".")

    server, client = way.connect(model)
    stream = client.stream("x", timeout_s=0.5)
    with pytest.raises(Timeout) as caught:
        for _ in stream:
            pass
    assert set(caught.value.partial_text) <= {"."}
    assert server.visitors.requests[0].gone.wait(10)


def test_wait_ready_gives_up_with_the_reason(way: Any) -> None:
    server, client = way.connect(streaming())
    server.models["scheduler"] = ("UNAVAILABLE", "no such file")
    with pytest.raises(ServerNotReady, match="no such file"):
        client.wait_ready(0.05)


def test_a_missing_model_is_a_server_not_ready(way: Any) -> None:
    _, client = way.connect(saying(RuntimeError("Request for unknown model: 'scheduler' is not found")))
    with pytest.raises(ServerNotReady):
        client.generate("x")


def test_saturated_is_raised_unless_retries_are_asked_for(way: Any) -> None:
    full = RuntimeError("REJECTED_SATURATED: full; retry after 0.01 s")

    def model(request: Any) -> Any:
        first = sum(r.prompt == request.prompt for r in server.visitors.requests) <= 2
        yield full if first else last("done", 1)

    server = way.serve(model)
    with pytest.raises(Saturated) as caught:
        way.client(server.url).generate("a")
    assert caught.value.retry_after_s == pytest.approx(0.01)
    assert way.client(server.url, retries=2).generate("b").text == "done"
    assert [r.prompt for r in server.visitors.requests] == ["a", "b", "b", "b"]


def test_retries_end_and_the_last_word_counts(way: Any) -> None:
    server, client = way.connect(saying(RuntimeError("REJECTED_SATURATED: full; retry after 0.01 s")), retries=2)
    with pytest.raises(Saturated):
        list(client.stream("x"))
    assert len(server.visitors.requests) == 3


def test_a_request_whose_server_dies_before_its_first_token_is_sent_again_when_asked_for(way: Any) -> None:
    first = way.serve(hanging())

    def restart() -> None:
        first.visitors.wait_for(lambda request: True)
        first.die()
        way.serve(streaming(["back"]), port=first.port)

    restarting = threading.Thread(target=restart)
    restarting.start()
    assert way.client(first.url, retries=8).generate("x").text == "back"
    restarting.join()


def test_a_closed_client_ends_its_streams_and_begins_no_other(way: Any) -> None:
    _, client = way.connect(hanging(chunk("a")), stop_on_close=True)
    stream, waiting = client.stream("x"), client.stream("y")
    assert next(stream).text == next(waiting).text == "a"
    client.close()
    with pytest.raises((Cancelled, ConnectionFailed)) as caught:
        next(stream)
    assert caught.value.partial_text == "a"
    waiting.close()  # nothing more can be said to the server
    assert waiting.result.outcome == "CANCELLED"
    for ask in (client.generate, client.stop, lambda text: next(client.stream(text))):
        with pytest.raises(ConnectionFailed, match="the client is closed"):
            ask("z")


@pytest.mark.parametrize("way", [("sync", "grpc"), ("asyncio", "grpc")], ids="-".join, indirect=True)
def test_requests_go_round_the_servers_of_a_name_and_past_one_that_died(way: Any) -> None:
    servers = [way.serve(streaming()) for _ in range(2)]
    client = way.client("ipv4:" + ",".join(server.url for server in servers), round_robin=True, retries=5)
    until_s = time.monotonic() + 20
    while not all(server.visitors.requests for server in servers):
        client.generate("until both are connected")
        assert time.monotonic() < until_s
    before = [len(server.visitors.requests) for server in servers]
    for _ in range(6):
        client.generate("x")
    assert [len(server.visitors.requests) for server in servers] == [count + 3 for count in before]
    servers[0].die()
    for _ in range(4):
        assert client.generate("x").text == "Paris."


def test_what_has_been_seen_is_never_asked_for_again(way: Any) -> None:
    server, client = way.connect(hanging(chunk("half")), retries=3)
    stream = client.stream("x")
    next(stream)
    server.die()
    with pytest.raises(ConnectionFailed) as caught:
        next(stream)
    assert caught.value.partial_text == "half"
    assert len(server.visitors.requests) == 1


@pytest.mark.parametrize(("status", "kind"), [(429, Saturated), (502, ConnectionFailed), (401, Failed)])
def test_what_a_proxy_answers_is_told_from_what_the_server_does(status: int, kind: type[Exception]) -> None:
    error = from_status(status, b"<html>not from Triton</html>")
    assert type(error) is kind
    assert str(status) in str(error)
    assert isinstance(from_status(503, b'{"error": "REJECTED_SATURATED: full; retry after 2.0 s"}'), Saturated)


def test_errors_survive_the_way_between_processes() -> None:
    given = [InvalidRequest("top_p", 7.0, "a number in (0, 1]"), Saturated("full", 2.5), DeadlineExpired("late")]
    for error in given:
        error.request_id, error.partial_text = "r1", "half"
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_a_wait_that_would_outlast_the_timeout_is_not_begun(way: Any) -> None:
    _, client = way.connect(saying(RuntimeError("REJECTED_SATURATED: full; retry after 60.0 s")), retries=5)
    began_s = time.monotonic()
    with pytest.raises(Saturated):
        client.generate("x", timeout_s=5)
    assert time.monotonic() - began_s < 4


def test_cheap_mistakes_never_leave_the_house(way: Any) -> None:
    server, client = way.connect(streaming())
    wrong: list[tuple[str, dict[str, Any]]] = [
        ("text_input", {}),
        ("text_input", {"prompt": "x", "input_ids": [1]}),
        ("text_input", {"prompt": 7}),
        ("text_input", {"prompt": "\ud800"}),
        ("input_ids", {"input_ids": []}),
        ("input_ids", {"input_ids": [2**31]}),
        ("max_tokens", {"prompt": "x", "max_tokens": 1.5}),
        ("max_tokens", {"prompt": "x", "max_tokens": True}),
        ("temperature", {"prompt": "x", "temperature": float("nan")}),
        ("temperature", {"prompt": "x", "temperature": 1e300}),
        ("seed", {"prompt": "x", "seed": -1}),
        ("stop_words", {"prompt": "x", "stop_words": ["a", 1]}),
        ("priority", {"prompt": "x", "priority": "urgent"}),
        ("deadline_ms", {"prompt": "x", "deadline_ms": "soon"}),
    ]
    for field, arguments in wrong:
        with pytest.raises(InvalidRequest) as caught:
            client.generate(**arguments)
        assert caught.value.field == field, arguments
    for messages in ([], "hello", [{"content": "x"}], [{"role": 1, "content": "x"}], ["x"]):
        with pytest.raises(InvalidRequest) as caught:
            client.chat(messages)
        assert caught.value.field == "messages"
    with pytest.raises(TypeError, match="max_token"):
        client.generate("x", max_token=3)
    assert server.visitors.requests == []


def test_nothing_leaks_over_many_streams(sync_way: Any) -> None:
    """Threads and sockets after a hundred answers, finished, broken off and failed, are those of before."""
    import os

    def model(request: Any) -> Any:
        yield chunk("a")
        if request.prompt == "hang":
            request.gone.wait(20)
        elif request.prompt == "fail":
            yield RuntimeError("FAILED: on purpose")
        else:
            yield last()

    def round_of_three(client: Client) -> None:
        assert len(list(client.stream("end"))) == 2
        with client.stream("hang") as stream:
            next(stream)
        with pytest.raises(Failed):
            list(client.stream("fail"))

    server = sync_way.serve(model)

    def client_of_its_own() -> None:
        with Client(server.url, protocol=sync_way.protocol) as client:
            round_of_three(client)

    client_of_its_own()
    client_of_its_own()
    for request in list(server.visitors.requests):
        assert request.prompt != "hang" or request.gone.wait(10)

    def stable() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    threads, files = stable()
    for _ in range(30):
        client_of_its_own()
    end_s = time.monotonic() + 10
    while stable() > (threads + 2, files + 6) and time.monotonic() < end_s:
        threading.Event().wait(0.02)  # the server's side of closed connections ends a moment later
    now_threads, now_files = stable()
    assert now_threads <= threads + 2
    assert now_files <= files + 6


def test_an_empty_prompt_is_the_servers_to_judge() -> None:
    text = "REJECTED_INVALID: text_input: given '', allowed: at least one character"
    with FakeTritonGrpc(saying(RuntimeError(text))) as server, Client(server.url) as client:
        with pytest.raises(InvalidRequest) as caught:
            client.generate("")
        assert (caught.value.field, caught.value.given) == ("text_input", "''")
        assert caught.value.allowed == "at least one character"
