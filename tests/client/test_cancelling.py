"""Whoever breaks an answer off stops the work on the server, once, and nothing stays behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest
from tritandem_client import AsyncClient, Client

from tests.client.scripts import chunk, hanging, streaming
from tests.fakes.triton_grpc import FakeTritonGrpc
from tests.fakes.triton_http import FakeTritonHttp


def is_question(request: Any) -> bool:
    return not request.is_stop


def test_closing_a_stream_is_seen_by_the_server(way: Any) -> None:
    server, client = way.connect(hanging(chunk("a")))
    stream = client.stream("x")
    assert next(stream).text == "a"
    stream.close()
    assert server.visitors.wait_for(is_question).gone.wait(10)
    assert next(stream, None) is None
    assert (stream.result.text, stream.result.outcome) == ("a", "CANCELLED")
    stream.close()


def test_leaving_the_block_cancels(way: Any) -> None:
    server, client = way.connect(hanging(chunk("a")))
    with client.stream("x") as stream:
        next(stream)
    assert server.visitors.wait_for(is_question).gone.wait(10)


def test_an_exception_of_the_caller_cancels(way: Any) -> None:
    server, client = way.connect(hanging(chunk("a")))

    def handle_one() -> None:
        with client.stream("x") as stream:
            raise ZeroDivisionError(next(stream).text)

    with pytest.raises(ZeroDivisionError):
        handle_one()
    assert server.visitors.wait_for(is_question).gone.wait(10)


def test_breaking_out_of_the_loop_cancels(sync_way: Any) -> None:
    server, client = sync_way.connect(hanging(chunk("a")))
    for _ in client.stream("x"):
        break
    gc.collect()
    assert server.visitors.wait_for(is_question).gone.wait(10)


def test_dropping_an_asyncio_stream_cancels() -> None:
    async def run(server: FakeTritonGrpc) -> None:
        async with AsyncClient(server.url) as client:
            async for _ in client.stream("x"):
                break
            gc.collect()
            request = server.visitors.wait_for(is_question)
            assert await asyncio.to_thread(request.gone.wait, 10)

    with FakeTritonGrpc(hanging(chunk("a"))) as server:
        asyncio.run(run(server))


def test_where_cancelling_does_not_reach_the_work_a_stop_follows(way: Any) -> None:
    server, client = way.connect(hanging(chunk("a")), model="ensemble")
    with client.stream("x", request_id="r7") as stream:
        next(stream)
    client.health()  # lets the event loop, where there is one, do the sending
    assert server.visitors.wait_for(lambda r: r.is_stop).request_id == "r7"
    assert server.visitors.wait_for(is_question).gone.wait(10)


def test_the_direct_model_over_grpc_needs_no_stop() -> None:
    with FakeTritonGrpc(hanging(chunk("a"))) as server:
        with Client(server.url) as client, client.stream("x") as stream:
            next(stream)
        assert server.visitors.requests[0].gone.wait(10)
        assert len(server.visitors.requests) == 1  # closing the client would have waited for a stop


def test_over_http_a_stop_says_what_a_closed_connection_says_late(sync_way: Any) -> None:
    server, client = sync_way.connect(hanging())
    stream = client.stream("x", request_id="r8")
    reader = threading.Thread(target=lambda: list(stream))
    reader.start()
    server.visitors.wait_for(is_question)
    stream.close()
    reader.join(10)
    client.close()  # waits for the stop, if there is one
    assert [r.request_id for r in server.visitors.requests if r.is_stop] == ["r8"] * (sync_way.protocol == "http")


@pytest.mark.parametrize("wanted", [False, True])
def test_stop_on_close_can_be_chosen(wanted: bool) -> None:
    with FakeTritonGrpc(hanging(chunk("a"))) as server:
        with Client(server.url, stop_on_close=wanted) as client, client.stream("x") as stream:
            next(stream)
        assert any(r.is_stop for r in server.visitors.requests) is wanted


def test_a_finished_stream_sends_no_stop(way: Any) -> None:
    server, client = way.connect(streaming(), model="ensemble")
    with client.stream("x") as stream:
        list(stream)
    client.generate("y")
    assert not any(r.is_stop for r in server.visitors.requests)


@pytest.mark.parametrize("first", [[], [chunk("a")]], ids=["before its first token", "after it"])
def test_another_thread_may_close_a_stream_that_waits(first: list[Any], sync_way: Any) -> None:
    server, client = sync_way.connect(hanging(*first), timeout_s=60.0)
    stream = client.stream("x")
    chunks: list[Any] = []
    reader = threading.Thread(target=lambda: chunks.extend(stream))
    reader.start()
    question = server.visitors.wait_for(is_question)
    while len(chunks) < len(first):
        assert reader.is_alive()
    stream.close()
    assert question.gone.wait(10)
    reader.join(10)
    assert not reader.is_alive()
    assert len(chunks) == len(first)
    assert stream.result.outcome == "CANCELLED"


@pytest.mark.parametrize("first", [[], [chunk("a")]], ids=["before its first token", "after it"])
@pytest.mark.parametrize("kind", [FakeTritonGrpc, FakeTritonHttp])
def test_another_task_may_close_a_stream_that_waits(kind: Any, first: list[Any]) -> None:
    async def run(server: Any) -> None:
        async with AsyncClient(server.url, protocol=server.protocol, timeout_s=60.0) as client:
            stream = client.stream("x")
            chunks: list[Any] = []

            async def read() -> None:
                async for one in stream:
                    chunks.append(one)

            reader = asyncio.create_task(read())
            question = await asyncio.to_thread(server.visitors.wait_for, is_question)
            while len(chunks) < len(first):
                await asyncio.sleep(0.01)
            await stream.close()
            await asyncio.wait_for(reader, 10)  # it ends in peace: its task was not cancelled
            assert await asyncio.to_thread(question.gone.wait, 10)
            assert (len(chunks), stream.result.outcome) == (len(first), "CANCELLED")

    with kind(hanging(*first)) as server:
        asyncio.run(run(server))


@pytest.mark.parametrize("model", ["scheduler", "ensemble"])
def test_cancelling_a_task_cancels_its_request(model: str) -> None:
    async def run(server: FakeTritonGrpc) -> None:
        async with AsyncClient(server.url, model=model) as client:
            task = asyncio.create_task(client.generate("x"))
            request = await asyncio.to_thread(server.visitors.wait_for, is_question)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert await asyncio.to_thread(request.gone.wait, 10)
            if model == "ensemble":
                await asyncio.to_thread(server.visitors.wait_for, lambda r: r.is_stop)

    with FakeTritonGrpc(hanging()) as server:
        asyncio.run(run(server))


def test_a_hundred_asyncio_streams_run_at_once() -> None:
    """None may end before all have begun: the server holds every stream until it has seen a hundred."""
    everybody = threading.Barrier(100)

    def model(request: Any) -> Any:
        yield chunk("begun ")
        everybody.wait(20)
        yield chunk(request.prompt)

    async def one(client: AsyncClient, i: int) -> str:
        return "".join([c.text async for c in client.stream(str(i))])

    async def run(url: str) -> list[str]:
        async with AsyncClient(url) as client:
            return await asyncio.gather(*(one(client, i) for i in range(100)))

    with FakeTritonGrpc(model, workers=110) as server:
        assert asyncio.run(run(server.url)) == [f"begun {i}" for i in range(100)]


def test_threads_share_a_client() -> None:
    everybody = threading.Barrier(12)

    def model(request: Any) -> Any:
        everybody.wait(20)
        yield chunk(request.prompt)

    answers: dict[int, str] = {}
    with FakeTritonGrpc(model, workers=16) as server, Client(server.url) as client:

        def ask(i: int) -> None:
            answers[i] = client.generate(str(i)).text

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert answers == {i: str(i) for i in range(12)}
