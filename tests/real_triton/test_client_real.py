"""tritandem_client against the real server: every protocol, directly and through the ensemble."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from threading import Event

import pytest
from tritandem.server import TritonServer
from tritandem_client import AsyncClient, Client, DeadlineExpired, InvalidRequest, ServerNotReady

from tests.real_triton.raw_client import RawClient, in_background

pytestmark = pytest.mark.triton

QUESTION = "The capital of France is"
LONG = {"max_tokens": 8000, "sampling_parameters": {"ignore_eos": True}}  # far longer than IDLE_WITHIN_S on any CPU
IDLE_WITHIN_S = 30.0
WAYS = [(protocol, model) for protocol in ("grpc", "http") for model in ("scheduler", "ensemble")]


@pytest.fixture(params=WAYS, ids="-".join)
def connected(request: pytest.FixtureRequest, server: TritonServer) -> Iterator[Client]:
    protocol, model = request.param
    url = server.grpc_url if protocol == "grpc" else server.http_url
    with Client(url, protocol=protocol, model=model, timeout_s=120) as client:
        yield client


def wait_until_idle(raw: RawClient) -> None:
    end_s = time.monotonic() + IDLE_WITHIN_S
    while (load := raw.engine_load()).running + load.waiting:
        assert time.monotonic() < end_s, f"still at work: {load}"
        Event().wait(0.05)


def test_generate_knows_the_answer_and_all_about_it(connected: Client) -> None:
    result = connected.generate(QUESTION, max_tokens=8, request_id="my-id")
    assert result.text.startswith(" Paris")
    assert (result.finish_reason, result.outcome, result.request_id) == ("length", "COMPLETED", "my-id")
    assert (result.num_input_tokens, result.num_output_tokens) == (5, 8)
    stamps = result.timings.server
    assert 0 < stamps["received_ns"] <= stamps["first_token_ns"] <= stamps["last_token_ns"] <= stamps["finished_ns"]


def test_a_stream_is_the_same_answer_in_pieces(connected: Client) -> None:
    options = {"max_tokens": 10, "stop_words": ["\n\n\n"]}
    stream = connected.stream("Translate to Japanese and add an emoji: I love cats 🐈.", **options)
    chunks = list(stream)
    assert len(chunks) > 1
    assert sum(chunk.num_output_tokens for chunk in chunks) == stream.result.num_output_tokens
    whole = connected.generate("Translate to Japanese and add an emoji: I love cats 🐈.", **options)
    assert (stream.result.text, stream.result.finish_reason) == (whole.text, whole.finish_reason)


def test_every_option_is_understood(connected: Client) -> None:
    options = {
        "max_tokens": 6,
        "min_tokens": 2,
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.9,
        "min_p": 0.01,
        "seed": 7,
        "stop_words": ["END"],
        "bad_words": ["Paris", " Paris"],
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logprobs": 3,
        "exclude_input": True,
        "priority": "interactive",
        "deadline_ms": 60_000,
        "tenant": "tests",
    }
    result = connected.generate(QUESTION, **options)
    assert "Paris" not in result.text
    assert len(result.logprobs) == result.num_output_tokens
    assert all(one.logprob <= 0 and len(one.top) >= 3 for one in result.logprobs)
    assert result.cumulative_logprob == pytest.approx(sum(one.logprob for one in result.logprobs), abs=1e-3)
    assert connected.generate(QUESTION, **options).text == result.text, "a seed fixes the answer"


def test_chat_uses_the_chat_template(connected: Client) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    result = connected.chat(messages, max_tokens=16)
    assert "Paris" in result.text
    assert result.num_input_tokens > 20, "the template adds its own tokens"
    assert "".join(chunk.text for chunk in connected.chat_stream(messages, max_tokens=16)) == result.text


def test_a_wrong_field_is_named(connected: Client) -> None:
    for options in ({"top_p": 7.0}, {"max_tokens": 0}, {"temperature": -1.0}, {"sampling_parameters": {"nonsense": 1}}):
        with pytest.raises(InvalidRequest) as caught:
            list(connected.stream(QUESTION, **options))
        assert caught.value.field in (*options, "nonsense"), options
        assert caught.value.allowed
    with pytest.raises(InvalidRequest) as caught:
        connected.generate("")
    assert caught.value.field == "text_input"


def test_a_deadline_ends_the_request(connected: Client, client: RawClient) -> None:
    with pytest.raises(DeadlineExpired):
        connected.generate(QUESTION, deadline_ms=300, **LONG)
    wait_until_idle(client)


def test_breaking_off_frees_the_engine(connected: Client, client: RawClient) -> None:
    wait_until_idle(client)
    for chunk in connected.stream(QUESTION, **LONG):
        assert chunk.text
        break
    wait_until_idle(client)


def test_stop_ends_an_answer_that_another_reads(connected: Client) -> None:
    stream = connected.stream(QUESTION, **LONG)
    first = next(stream)
    reader, outcome = in_background(stream.drain)
    connected.stop(stream.request_id)
    reader.join(IDLE_WITHIN_S)
    [result] = outcome
    assert (result.outcome, result.finish_reason) == ("STOPPED", "cancelled")
    assert result.text.startswith(first.text)


def test_health_and_a_model_that_is_not_there(connected: Client, server: TritonServer) -> None:
    health = connected.health()
    assert health.ready
    assert health.models[connected.model] == "READY"
    with Client(f"{connected.address.protocol}://{connected.address.host_port}", model="nobody") as other:
        assert not other.health()
        with pytest.raises(ServerNotReady):
            other.generate("x")


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_twenty_asyncio_streams_share_a_client(protocol: str, server: TritonServer) -> None:
    async def one(client: AsyncClient, i: int) -> str:
        return "".join([chunk.text async for chunk in client.stream(f"{i}, {i + 1}, {i + 2},", max_tokens=4)])

    async def run() -> list[str]:
        url = server.grpc_url if protocol == "grpc" else server.http_url
        async with AsyncClient(url, protocol=protocol) as client:
            alone = [await one(client, i) for i in range(0, 20, 7)]
            together = await asyncio.gather(*(one(client, i) for i in range(20)))
            assert [together[i] for i in range(0, 20, 7)] == alone
            return together

    assert all(asyncio.run(run()))
