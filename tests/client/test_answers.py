"""What a caller gets, the same over threads and asyncio, gRPC and HTTP."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tritandem_client import TokenLogprob

from tests.client.scripts import chunk, hanging, last, saying, streaming


def test_generate_gives_the_whole_answer_with_counts_and_stamps(way: Any) -> None:
    _, client = way.connect(saying(last("Paris.", 3, "length")))
    result = client.generate("The capital of France is", request_id="r1")
    assert (result.text, result.finish_reason, result.outcome, result.request_id) == (
        "Paris.",
        "length",
        "COMPLETED",
        "r1",
    )
    assert (result.num_input_tokens, result.num_output_tokens, result.cached_tokens) == (5, 3, 3)
    assert result.timings.server["received_ns"] == 10
    assert result.timings.server["finished_ns"] == 90
    assert 0 < result.timings.ttft_s <= result.timings.total_s


@pytest.mark.parametrize(("said", "meant"), [('"END"', "END"), ("42", 42), (None, None)])
def test_what_stopped_an_answer_is_asked_for_by_report(way: Any, said: str | None, meant: str | int | None) -> None:
    end = {**last("Paris.", 3), **({"stop_reason": ("BYTES", [said])} if said else {})}
    server, client = way.connect(saying(end), report=("stop_reason",))
    assert client.generate("x").stop_reason == meant
    assert server.visitors.requests[0].inputs["return_stop_reason"] == [True]
    assert [chunk.stop_reason for chunk in client.stream("x")] == [meant]


def test_the_seed_is_asked_for_by_report(way: Any) -> None:
    answer = {**last("Paris.", 3), "used_seed": ("UINT64", [2**53 - 1])}
    server, client = way.connect(saying(answer), report=("seed",))
    assert client.generate("x").seed == 2**53 - 1
    assert server.visitors.requests[0].inputs["return_seed"] == [True]
    _, silent = way.connect(saying(last("Paris.", 3)))
    assert silent.generate("x").seed is None


def test_stream_gives_every_chunk_in_order_and_then_the_result(way: Any) -> None:
    _, client = way.connect(streaming())
    stream = client.stream("The capital of France is")
    assert [c.text for c in stream] == ["Par", "is", ".", ""]
    assert (stream.result.text, stream.result.num_output_tokens) == ("Paris.", 3)
    assert next(stream, None) is None, "an ended stream stays ended"


def test_a_coalesced_chunk_counts_all_its_tokens(way: Any) -> None:
    _, client = way.connect(saying(chunk("a", 1), chunk("bcdef", 5), last("g", 1)))
    stream = client.stream("x")
    assert [c.num_output_tokens for c in stream] == [1, 5, 1]
    assert stream.result.num_output_tokens == 7


def test_no_character_is_lost_or_split(way: Any) -> None:
    # U+2028 and U+0085 end a line in Python, not in an event stream; \n and quotes need JSON's escapes.
    pieces = ["é😀", "日本語", " a\u2028b\x85c", 'line\n"quoted"\r\n', "\x00\x0b", "data: x", "ü" * 40_000]
    _, client = way.connect(streaming(pieces))
    stream = client.stream("🎌 " + "".join(pieces))
    assert [c.text for c in stream] == [*pieces, ""]


def test_the_prompt_arrives_as_it_was_given(way: Any) -> None:
    server, client = way.connect(streaming())
    prompt = "é😀 \n\t\u2028 \x00 'quoted' \\ "
    client.generate(prompt)
    assert server.visitors.requests[0].inputs["text_input"] == [prompt]


def test_an_empty_final_response_is_no_chunk(way: Any) -> None:
    _, client = way.connect(saying(chunk("a"), last("b", 1), None))
    assert [c.text for c in client.stream("x")] == ["a", "b"]


def test_an_answer_without_any_detail_is_still_an_answer(way: Any) -> None:
    """Other deployments know neither counts nor reasons."""
    server, client = way.connect(saying({"text_output": ("BYTES", ["hello"])}), report=())
    result = client.generate("x")
    assert (result.text, result.finish_reason, result.outcome, result.num_output_tokens) == (
        "hello",
        None,
        "COMPLETED",
        0,
    )
    assert set(server.visitors.requests[0].inputs) == {"text_input", "exclude_input_in_output"}


def test_several_answers_are_told_apart_in_a_stream_and_in_one_response(way: Any) -> None:
    def said(text: str, index: int, **more: Any) -> Any:
        return {**chunk(text, **more), "sequence_index": ("INT32", [index])}

    end = {"finish_reason": ("BYTES", ["length"]), "used_seed": ("UINT64", [9])}
    own, others = {"cached_tokens": ("UINT32", [0])}, {"cached_tokens": ("UINT32", [4])}
    ends = said("d", 0, **end, **own), said("c", 1, **end, **others)
    server, client = way.connect(saying(said("a", 0), said("b", 1), *ends))
    stream = client.stream("x", n=2)
    assert [(one.index, one.text) for one in stream] == [(0, "a"), (1, "b"), (0, "d"), (1, "c")]
    assert stream.result.cached_tokens == 0, "of the first: the others take its prompt"
    assert [(one.text, one.finish_reason, one.num_output_tokens, one.seed) for one in stream.result.choices] == [
        ("ad", "length", 2, 9),
        ("bc", "length", 2, 9),
    ]
    assert (stream.result.text, stream.result.num_output_tokens) == ("ad", 4)
    assert server.visitors.requests[0].inputs["n"] == [2]
    whole = {
        "text_output": ("BYTES", ["ad", "bc"]),
        "finish_reason": ("BYTES", ["length", "stop"]),
        "num_output_tokens": ("UINT32", [2, 1]),
        "num_input_tokens": ("UINT32", [5]),
    }
    _, client = way.connect(saying(whole))
    result = client.generate("x", n=2)
    assert [(one.text, one.finish_reason) for one in result.choices] == [("ad", "length"), ("bc", "stop")]
    assert (result.text, result.num_output_tokens, result.num_input_tokens) == ("ad", 3, 5)


def test_a_prompts_logprobs_come_first_and_stay_with_the_result(way: Any) -> None:
    said = [
        {"3": {"logprob": None, "rank": None, "decoded_token": "x"}},
        {"7": {"logprob": -0.5, "decoded_token": "a"}},
    ]
    first = chunk("a", prompt_logprobs=("BYTES", [json.dumps(said)]))
    server, client = way.connect(saying(first, last("", 0)))
    stream = client.stream("x a", prompt_logprobs=0)
    assert [len(said.prompt_logprobs) for said in stream] == [2, 0]
    result = stream.result
    assert result.prompt_logprobs == (TokenLogprob(3, None, "x"), TokenLogprob(7, -0.5, "a", ((7, -0.5),), ("a",)))
    assert result.logprobs == ()
    inputs = server.visitors.requests[0].inputs
    assert inputs["return_prompt_logprobs"] == [True]
    assert json.loads(inputs["sampling_parameters"][0]) == {"prompt_logprobs": 0}


def test_logprobs_are_typed(way: Any) -> None:
    said = [
        {
            "7": {"logprob": -0.5, "rank": 2, "decoded_token": "a"},
            "9": {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
        }
    ]
    details = {"logprobs": ("BYTES", [json.dumps(said)]), "cumulative_logprob": ("FP32", [-0.5])}
    server, client = way.connect(saying(chunk("a", **details), {**last("", 0), "logprobs": ("BYTES", ["[]"])}))
    stream = client.stream("x", logprobs=1)
    assert next(stream).logprobs == (TokenLogprob(7, -0.5, "a", ((9, -0.25), (7, -0.5)), ("b", "a")),)
    assert [c.logprobs for c in stream] == [()]
    assert stream.result.cumulative_logprob == pytest.approx(-0.5)
    inputs = server.visitors.requests[0].inputs
    assert inputs["return_logprobs"] == inputs["return_cumulative_logprob"] == [True]
    assert json.loads(inputs["sampling_parameters"][0]) == {"logprobs": 1}


def test_chat_sends_messages_as_a_parameter_and_no_text(way: Any) -> None:
    server, client = way.connect(streaming(["Hi"]))
    messages = [{"role": "system", "content": "brief, é"}, {"role": "user", "content": "hello"}]
    assert client.chat(messages).text == "Hi"
    assert [c.text for c in client.chat_stream(messages)] == ["Hi", ""]
    for request in server.visitors.requests:
        assert json.loads(request.parameters["messages"]) == messages
        assert "text_input" not in request.inputs


def test_tools_go_beside_a_chat(way: Any) -> None:
    server, client = way.connect(streaming(["Hi"]))
    tools = [{"type": "function", "function": {"name": "wetter", "description": "für Köln"}}]
    client.chat([{"role": "user", "content": "hello"}], tools=tools)
    client.chat([{"role": "user", "content": "hello"}], tools=[])
    first, second = (request.parameters for request in server.visitors.requests)
    assert json.loads(first["tools"]) == tools
    assert "tools" not in second


def test_only_what_the_caller_gave_is_sent(way: Any) -> None:
    server, client = way.connect(streaming())
    list(client.stream("x"))
    reported = {"return_finish_reason", "return_num_input_tokens", "return_num_output_tokens"}
    assert set(server.visitors.requests[0].inputs) == {"text_input", "stream", *reported}
    assert server.visitors.requests[0].parameters == {}


def test_every_option_reaches_the_server(way: Any) -> None:
    server, client = way.connect(streaming())
    options: dict[str, Any] = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.25,
        "min_p": 0.125,
        "seed": 2**64 - 1,
        "repetition_penalty": 1.5,
        "presence_penalty": -0.5,
        "frequency_penalty": 0.75,
        "end_id": 2,
        "stop_words": ["\n\n", "END"],
        "bad_words": "no",
        "allowed_token_ids": [5, 6],
    }
    client.generate(
        input_ids=[1, 2, 3],
        **options,
        logit_bias={7: -100, 3: 0.5},
        priority="batch",
        deadline_ms=1500,
        tenant="t",
        traceparent="00-ab-cd-01",
        sampling_parameters={"x": 1},
    )
    request = server.visitors.requests[0]
    for name, value in options.items():
        assert request.inputs[name] == (value if isinstance(value, list) else [value]), name
    assert request.inputs["input_ids"] == [1, 2, 3]
    assert json.loads(request.inputs["logit_bias"][0]) == {"7": -100, "3": 0.5}
    assert json.loads(request.inputs["sampling_parameters"][0]) == {"x": 1}
    assert request.parameters == {
        "priority_class": "batch",
        "deadline_ms": 1500,
        "tenant": "t",
        "traceparent": "00-ab-cd-01",
    }


def test_stop_names_the_request_and_nothing_else(way: Any) -> None:
    server, client = way.connect(hanging())
    client.stop("r42")
    request = server.visitors.requests[0]
    assert (request.request_id, request.inputs) == ("r42", {"stop": [True]})


def test_a_stopped_answer_is_a_result(way: Any) -> None:
    _, client = way.connect(saying(chunk("par"), last("", 0, "cancelled", "STOPPED")))
    stream = client.stream("x")
    assert "".join(c.text for c in stream) == "par"
    assert (stream.result.outcome, stream.result.finish_reason) == ("STOPPED", "cancelled")


def test_health_tells_server_and_models_apart(way: Any) -> None:
    server, client = way.connect(streaming())
    assert client.health().ready
    server.models["scheduler"] = ("UNAVAILABLE", "no such file")
    health = client.health()
    assert (health.live, health.ready, health.models["scheduler"]) == (True, False, "no such file")
    server.models["scheduler"] = ("READY", "")
    server.index_closed = True
    assert client.health().models == {"scheduler": "READY"}
    server.ready = False
    assert not client.health()


def test_headers_travel_with_every_request(way: Any) -> None:
    server, client = way.connect(streaming(), headers={"authorization": "Bearer x"})
    client.generate("x")
    assert {k.lower(): v for k, v in server.visitors.requests[0].headers.items()}["authorization"] == "Bearer x"
