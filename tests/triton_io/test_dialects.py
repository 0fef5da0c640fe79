"""Facades: what each dialect's requests mean, and how their answers look."""

from __future__ import annotations

import itertools
import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils
from tritandem.contracts.answers import Chunk, Stamps, TokenLogprob
from tritandem.contracts.errors import ConfigError, InvalidRequest, Outcome
from tritandem.contracts.requests import GenerationRequest
from tritandem.contracts.stream import FinishReason
from tritandem.triton_io.answer.sinks import TritonSink
from tritandem.triton_io.request.decoder import ReturnOptions, complete, decode
from tritandem.triton_io.request.dialects import exclude_input, take_dialect
from tritandem.triton_io.request.prompt_source import read_parameters
from tritandem.triton_io.request.tensor_values import Inputs
from tritandem.triton_io.stub_2_51.finished_calls import FinishedCalls

from tests.triton_io.handed_over import one, text
from tests.triton_io.test_request_decoder import LIMITS
from tools.repository import FACADES

IDS = np.array([[5, 6, 7]], np.int32)
FLAGS = ("return_finish_reason", "return_cumulative_logprob", "return_logprobs", "return_num_input_tokens",
         "return_num_output_tokens")  # fmt: skip
FORMS = {
    "finish_reason": np.object_, "cumulative_logprob": np.float32, "logprobs": np.object_,
    "num_input_tokens": np.uint32, "num_output_tokens": np.uint32,
}  # fmt: skip


def read(facade: str, arrays: dict[str, Any], **sampling: Any) -> tuple[GenerationRequest, ReturnOptions]:
    """As the scheduler gets it from a facade: its tensors under the names that it hands them over by."""
    handed = {FACADES[facade].inputs[name]: array for name, array in arrays.items()}
    if sampling:
        handed["sampling_parameters"] = text(json.dumps(sampling))
    dialect = take_dialect(handed)
    draft = decode("id", Inputs(handed), read_parameters(""), 0, dialect=dialect)
    ids = draft.prompt.input_ids
    return complete(draft, np.arange(5, dtype=np.int32) if ids is None else ids, 0, LIMITS), draft.returns


def answers(facade: str, returns: ReturnOptions) -> list[dict[str, Any]]:
    """Two tokens, in two responses or in one."""
    sender = pb_utils.ResponseSender()
    sink = TritonSink(sender, returns, FACADES[facade].outputs, str, FinishedCalls())
    token = TokenLogprob(3, -0.5, ((3, -0.5),))
    if returns.output.stream:
        sink.send(Chunk("a", 1, num_input_tokens=5, cumulative_logprob=-0.5, logprobs=(token,)))
    rest = 1 if returns.output.stream else 2
    stamps = Stamps(*range(1, 1 + len(fields(Stamps))))
    end = (FinishReason.LENGTH, Outcome.COMPLETED)
    sink.finish(Chunk("b", rest, *end, 5, 0, -1.0, (token,) * rest, stamps))
    return [response.arrays() for response in sender.wait_end()]


def test_the_vllm_backends_outputs_for_every_combination_of_its_flags() -> None:
    seen = 0
    for stream, exclude, *flags in itertools.product((True, False), *[(None, True, False)] * 6):
        given = {"stream": stream, "exclude_input_in_output": exclude, **dict(zip(FLAGS, flags, strict=True))}
        arrays = {name: one(value, np.bool_) for name, value in given.items() if value is not None}
        made, returns = read("vllm_model", {"text_input": text("hello")} | arrays)
        assert made.output.exclude_input == (stream if exclude is None else exclude)
        responses = answers("vllm_model", returns)
        assert len(responses) == 1 + stream
        wanted = {flag.removeprefix("return_") for flag in FLAGS if given[flag]}
        for at, response in enumerate(responses, start=1):
            assert set(response) == {"text_output"} | wanted
            assert all(array.shape == (1,) for array in response.values())
            assert all(response[name].dtype == FORMS[name] for name in wanted)
            if "finish_reason" in wanted:
                assert response["finish_reason"][0] == (b"length" if at == len(responses) else b"None")
            if "logprobs" in wanted:
                assert response["logprobs"][0] == b"null"
            if "num_output_tokens" in wanted:
                assert int(response["num_output_tokens"][0]) == (1 if stream else 2)
        seen += 1
    assert seen == 1458


def test_log_probabilities_that_the_parameters_ask_for_are_shown() -> None:
    _, returns = read("vllm_model", {"text_input": text("x"), "return_logprobs": one(True, np.bool_)}, logprobs=1)
    [response] = answers("vllm_model", returns)
    assert json.loads(response["logprobs"][0])[0] == {"3": {"logprob": -0.5, "rank": 1, "decoded_token": "3"}}


# (facade, its tensors) -> temperature, max_tokens, whether the prompt is repeated
MEANINGS: list[tuple[str, dict[str, Any], float, int, bool]] = [
    ("vllm_model", {}, 1.0, 16, True),
    ("tensorrt_llm_bls", {}, 0.0, 64, True),
    ("tensorrt_llm_bls", {"temperature": one(0.7, np.float32)}, 0.0, 64, True),
    ("tensorrt_llm_bls", {"temperature": one(0.7, np.float32), "top_k": one(1, np.int32)}, 0.0, 64, True),
    ("tensorrt_llm_bls", {"random_seed": one(3, np.uint64)}, 0.0, 64, True),
    ("tensorrt_llm_bls", {"temperature": one(0.7, np.float32), "top_k": one(5, np.int32)}, 0.7, 64, True),
    ("tensorrt_llm_bls", {"top_p": one(0.0, np.float32), "top_k": one(0, np.int32)}, 0.0, 64, True),
    ("tensorrt_llm_bls", {"top_p": one(0.5, np.float32), "max_tokens": one(3, np.int32)}, 1.0, 3, True),
    ("tensorrt_llm", {}, 0.0, 32, False),
    ("tensorrt_llm", {"sampling_param_temperature": one(0.7, np.float32)}, 0.0, 32, False),
    ("tensorrt_llm", {"sampling_param_top_p": one(0.5, np.float32)}, 1.0, 32, False),
    ("tensorrt_llm", {"sampling_param_exclude_input_from_output": one(False, np.bool_)}, 0.0, 32, True),
]


@pytest.mark.parametrize(("facade", "arrays", "temperature", "max_tokens", "echo"), MEANINGS)
def test_each_dialect_means_what_its_server_means(
    facade: str, arrays: dict[str, Any], temperature: float, max_tokens: int, echo: bool
) -> None:
    made, _ = read(facade, {"text_input": text("hello")} | arrays)
    assert (made.sampling.temperature, made.sampling.max_tokens) == (pytest.approx(temperature), max_tokens)
    assert (made.prompt_text == "hello") is echo


def test_token_ids_in_and_out() -> None:
    asked = {"input_ids": IDS, "input_lengths": one(3, np.int32), "request_output_len": one(2, np.int32)}
    for stream, echo in ((True, False), (False, True)):
        made, returns = read("tensorrt_llm", asked | {"streaming": one(stream, np.bool_)})
        assert made.sampling.max_tokens == 2
        responses = answers("tensorrt_llm", returns)
        ids = [response["output_ids"] for response in responses]
        assert np.concatenate(ids, axis=2).tolist() == [[[5, 6, 7, 3, 3] if echo else [3, 3]]]
        assert [response["sequence_length"].tolist() for response in responses] == [[[array.size]] for array in ids]
        assert all(response["sequence_index"].tolist() == [[0]] for response in responses)
    with pytest.raises(InvalidRequest, match="input_lengths: given 4, allowed: 3"):
        read("tensorrt_llm", asked | {"input_lengths": one(4, np.int32)})


def test_no_stream_of_the_trt_dialects_repeats_the_prompt() -> None:
    told = {"stream": one(True, np.bool_), "exclude_input_in_output": one(False, np.bool_)}
    made, _ = read("tensorrt_llm_bls", {"text_input": text("hello")} | told)
    assert made.prompt_text is None
    made, _ = read("vllm_model", {"text_input": text("hello")} | told)
    assert made.prompt_text == "hello"


def test_words_come_as_ids_in_one_row_and_their_ends_in_another() -> None:
    words = np.array([[[65, 66, 67, 0], [1, 3, -1, -1]]], np.int32)
    made, _ = read("tensorrt_llm", {"input_ids": IDS, "stop_words_list": words, "bad_words_list": words})
    assert made.stop_ids == (2, 65)
    assert made.stop_words == ("BC",)
    assert made.bad_words == ((65,), (66, 67))
    for none in ([[0], [-1]], [[-1, -1], [-1, -1]], [[], []]):
        words = np.array([none], np.int32)
        made, _ = read("tensorrt_llm", {"input_ids": IDS, "stop_words_list": words, "bad_words_list": words})
        assert (made.stop_ids, made.bad_words) == ((2,), ())
    for bad in ([[65], [2]], [[65], [0]], [[-1], [1]], [[1000], [1]]):
        with pytest.raises(InvalidRequest, match=r"(stop_words_list|stop_token_ids): given"):
            read("tensorrt_llm", {"input_ids": IDS, "stop_words_list": np.array([bad], np.int32)})


def test_times_come_last_and_only_when_asked_for() -> None:
    for asked in (True, False):
        flag = {"return_perf_metrics": one(asked, np.bool_)}
        _, returns = read("tensorrt_llm_bls", {"text_input": text("x"), "stream": one(True, np.bool_)} | flag)
        first, last = answers("tensorrt_llm_bls", returns)
        assert "arrival_time_ns" not in first
        names = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
        assert [name in last for name in names] == [asked] * 4
        blocks = [f"kv_cache_{what}_blocks" for what in ("alloc_total", "reused", "alloc_new")]
        if asked:
            assert [int(last[name][0][0]) for name in names] == [1, 3, 6, 7]
            assert [last[name].tolist() for name in blocks] == [[[1]], [[0]], [[1]]], "7 tokens of 16 a block"
            assert [last[name].tolist() for name in ("acceptance_rate", "total_draft_tokens")] == [[[0.0]], [[0]]]


def test_a_facades_name_for_the_prompt_tells_the_dialect_and_is_gone_afterwards() -> None:
    arrays = {"vllm_text": text("x"), "stream": one(True, np.bool_)}
    assert take_dialect(arrays).name == "vllm_model"
    assert set(arrays) == {"text_input", "stream"}


def test_a_prompt_of_two_names_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="given 'text_input and input_ids'"):
        read("tensorrt_llm", {"input_ids": IDS, "text_input": text("hi")})
    for both in (("vllm_text", "text_input"), ("vllm_text", "bls_text")):
        with pytest.raises(InvalidRequest, match="text_input: given 'two prompts', allowed: one"):
            take_dialect({name: text("hi") for name in both})


@pytest.mark.parametrize(
    ("parameter", "meant"), [("", "streams"), ("true", "all"), ("True ", "all"), ("false", "none")], ids=repr
)
def test_the_parameter_of_the_model_goes_before_the_setting(parameter: str, meant: str) -> None:
    assert exclude_input(parameter, "streams") == meant


def test_a_parameter_of_the_model_that_says_neither_is_refused() -> None:
    with pytest.raises(ConfigError, match="exclude_input_in_output: given 'yes', allowed: true, false or nothing"):
        exclude_input("yes", "streams")
