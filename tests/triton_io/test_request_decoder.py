"""Tensors, JSON and parameters become one validated request, or a refusal that names the field."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tritandem.contracts.errors import InvalidRequest
from tritandem.contracts.requests import GenerationRequest, PriorityClass
from tritandem.triton_io.request import schema
from tritandem.triton_io.request.decoder import ModelLimits, complete, decode, read_request_id
from tritandem.triton_io.request.dialects import BLS, OWN, VLLM, Dialect
from tritandem.triton_io.request.prompt_source import read_parameters
from tritandem.triton_io.request.tensor_values import _NUMPY_OF_DTYPE, Inputs

from tests.triton_io.handed_over import one, text

PROMPT = {"text_input": text("hello")}
LIMITS = ModelLimits(
    max_context_tokens=100,
    vocab_size=1000,
    end_ids=(2,),
    default_max_tokens=64,
    default_priority=PriorityClass.NORMAL,
    default_deadline_s=0.0,
    encode_word=lambda word: [ord(c) % 1000 for c in word],
    spell=lambda ids: "".join(map(chr, ids)),
    control_ids={"<|im_end|>": 7, "<s>": 1},
)


def request(
    arrays: dict[str, Any], parameters: dict[str, Any] | None = None, tokens: int = 5, limits: ModelLimits = LIMITS
) -> GenerationRequest:
    draft = decode("id", Inputs(arrays), read_parameters(json.dumps(parameters or {})), received_ns=1_000)
    ids = draft.prompt.input_ids
    return complete(draft, np.arange(tokens, dtype=np.int32) if ids is None else ids, 2_000, limits)


def sampled(**values: Any) -> GenerationRequest:
    return request(PROMPT | {"sampling_parameters": text(json.dumps(values))})


def test_a_bare_prompt_is_greedy_and_takes_the_defaults() -> None:
    made = request(PROMPT)
    assert made.sampling.greedy
    assert made.sampling.max_tokens == 64
    assert made.stop_ids == (2,)
    assert made.priority is PriorityClass.NORMAL
    assert made.deadline_ns is None
    assert (made.received_ns, made.tokenized_ns) == (1_000, 2_000)
    assert made.output.finish_reason
    assert not made.output.stream


@pytest.mark.parametrize("asking", [{"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}, {"seed": 7}])
def test_asking_for_sampling_without_a_temperature_means_temperature_one(asking: dict[str, Any]) -> None:
    assert sampled(**asking).sampling.temperature == 1.0
    assert sampled(**asking, temperature=0).sampling.greedy


def test_every_request_that_samples_without_a_seed_gets_its_own() -> None:
    seeds = [sampled(temperature=1.0).sampling.seed for _ in range(1000)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**53 for seed in seeds), "a reader of JSON may round larger numbers"


@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_a_seed_that_is_given_is_kept(seed: int) -> None:
    assert request(PROMPT | {"seed": one(seed, np.uint64)}).sampling.seed == seed
    assert sampled(temperature=1.0, seed=seed).sampling.seed == seed


def test_greedy_requests_draw_no_seed() -> None:
    assert request(PROMPT).sampling == request(PROMPT).sampling
    assert sampled(temperature=0, top_p=0.5).sampling.seed == 0


@pytest.mark.parametrize(
    "neutral", [{"top_k": 1}, {"top_k": 0}, {"top_k": -1}, {"top_p": 1.0}, {"top_p": 0}, {"min_p": 0}]
)
def test_neutral_values_stay_greedy(neutral: dict[str, Any]) -> None:
    assert sampled(**neutral).sampling.greedy


def test_max_tokens_defaults_to_what_the_context_leaves() -> None:
    assert request(PROMPT, tokens=90).sampling.max_tokens == 10
    assert request(PROMPT, tokens=99).sampling.max_tokens == 1


def test_typed_and_json_values_of_one_field_must_agree() -> None:
    both = PROMPT | {"temperature": one(0.1, np.float32), "sampling_parameters": text('{"temperature": "0.1"}')}
    assert request(both, {"temperature": "0.1"}).sampling.temperature == pytest.approx(0.1)
    with pytest.raises(InvalidRequest, match=r"temperature: given .*0\.2"):
        request(both | {"sampling_parameters": text('{"temperature": 0.2}')})
    with pytest.raises(InvalidRequest, match="max_tokens"):
        request(PROMPT | {"max_tokens": one(5, np.int32)}, {"max_tokens": 6})


def test_a_float32_tensor_means_the_decimal_that_was_written() -> None:
    for name, value in (("repetition_penalty", 0.01), ("top_p", 0.9), ("temperature", 1e-3)):
        assert getattr(request(PROMPT | {name: one(value, np.float32)}).sampling, name) == value
    with pytest.raises(InvalidRequest, match=r"repetition_penalty: given 0.009, allowed: a number in \[0.01"):
        request(PROMPT | {"repetition_penalty": one(0.009, np.float32)})
    for value in (np.nan, np.inf):
        with pytest.raises(InvalidRequest, match=f"temperature: given {value}"):
            request(PROMPT | {"temperature": one(value, np.float32)})


def test_older_names_mean_the_same_field() -> None:
    made = request(PROMPT | {"min_length": one(3, np.int32), "random_seed": one(9, np.uint64)})
    assert (made.sampling.min_tokens, made.sampling.seed) == (3, 9)
    with pytest.raises(InvalidRequest, match="min_tokens"):
        request(PROMPT | {"min_length": one(3, np.int32), "min_tokens": one(4, np.int32)})


def test_end_id_replaces_the_models_end_tokens_and_minus_one_removes_them() -> None:
    assert request(PROMPT | {"end_id": one(7, np.int32)}).stop_ids == (7,)
    for none in (-1, 1000, 1048576):
        assert request(PROMPT | {"end_id": one(none, np.int32)}).stop_ids == (), "beyond the vocabulary: no token"
    assert sampled(ignore_eos=True).stop_ids == ()
    assert sampled(ignore_eos=True, stop_token_ids=[2]).stop_ids == (2,), "asked for by name"
    assert sampled(stop_token_ids=[5, 2, 5]).stop_ids == (2, 5)


def test_words_come_as_tensors_or_json_and_empty_ones_are_dropped() -> None:
    made = request(PROMPT | {"stop_words": text("a", "", "b"), "bad_words": text("xy")})
    assert made.stop_words == ("a", "b")
    assert made.bad_words == ((ord("x"), ord("y")),)
    assert sampled(stop="a").stop_words == ("a",)
    assert request(PROMPT | {"stop_words": text("")}).stop_words == ()


def test_a_stop_word_that_no_text_shows_is_a_stop_id_even_without_the_models_end_tokens() -> None:
    made = request(PROMPT | {"stop_words": text("<|im_end|>", "STOP"), "end_id": one(-1, np.int32)})
    assert (made.stop_words, made.stop_ids) == (("STOP",), (7,))
    assert sampled(stop=["<|im_end|>"]).stop_ids == (2, 7)


def test_the_budget_has_the_names_that_clients_know() -> None:
    for name in ("max_tokens", "max_completion_tokens", "max_new_tokens"):
        assert request(PROMPT, {name: 7}).sampling.max_tokens == sampled(**{name: 7}).sampling.max_tokens == 7


def test_the_newer_name_of_the_budget_goes_before_the_older_one() -> None:
    assert request(PROMPT, {"max_tokens": 60, "max_completion_tokens": 5}).sampling.max_tokens == 5
    assert request(PROMPT | {"max_tokens": one(60, np.int32)}, {"max_completion_tokens": "5"}).sampling.max_tokens == 5


def test_lists_come_as_texts_where_parameters_hold_no_lists() -> None:
    made = request(PROMPT, {"stop": '["a", "b"]', "stop_token_ids": "[3, 4]", "bad_words": "xy"})
    assert (made.stop_words, made.stop_ids, made.bad_words) == (("a", "b"), (2, 3, 4), ((ord("x"), ord("y")),))
    assert request(PROMPT, {"stop": "[1"}).stop_words == ("[1",), "a text is a text"
    with pytest.raises(InvalidRequest, match="stop: given"):
        request(PROMPT, {"stop": "[1]"})


def test_stops_that_the_client_named_are_told_apart_from_the_models_own() -> None:
    asked = {"stop_token_ids": [5, 2], "stop": ["x", "<|im_end|>"]}
    made = sampled(**asked)
    assert (made.stop_ids, made.named_stops) == ((2, 5, 7), ((5, 5), (7, "<|im_end|>"))), "2 is the model's end"
    assert sampled(**asked, ignore_eos=True).named_stops == ((5, 5), (2, 2), (7, "<|im_end|>"))
    assert sampled().named_stops == ()


def test_the_setting_says_whether_answers_begin_with_the_prompt_where_requests_do_not() -> None:
    for setting, once, streamed in (("streams", True, False), ("all", False, False), ("none", True, True)):
        for stream, echoed in ((False, once), (True, streamed)):
            arrays = PROMPT | {"stream": one(stream, np.bool_)}
            draft = decode("id", Inputs(arrays), {}, 0, exclude_input=setting)
            assert draft.returns.output.exclude_input is not echoed
            told = decode(
                "id", Inputs(arrays | {"exclude_input_in_output": one(True, np.bool_)}), {}, 0, exclude_input=setting
            )
            assert told.returns.output.exclude_input
    assert decode(
        "id", Inputs({"input_ids": np.array([[1]], np.int32)}), {}, 0, exclude_input="none"
    ).returns.output.exclude_input


def test_add_special_tokens_goes_with_a_text_alone() -> None:
    flag = {"add_special_tokens": one(False, np.bool_)}
    assert not decode("id", Inputs(PROMPT | flag), {}, 0).prompt.add_special_tokens
    assert decode("id", Inputs(PROMPT), {}, 0).prompt.add_special_tokens
    assert decode("id", Inputs(flag), {"messages": "[]"}, 0).prompt.chat == "[]", "nothing is added to a chat"
    with pytest.raises(InvalidRequest, match="add_special_tokens: given True"):
        request({"input_ids": np.array([[1]], np.int32), "add_special_tokens": one(True, np.bool_)})


@pytest.mark.parametrize(
    "tensor", [*schema.REFUSED_INPUTS, *schema.FACADE_REFUSED_INPUTS], ids=lambda tensor: tensor.name
)
def test_what_other_servers_serve_and_this_one_does_not_is_refused_by_name(tensor: schema.PublicTensor) -> None:
    shape = (1, *(2 if dim == -1 else dim for dim in tensor.dims))
    full = np.full(shape, b"x" if tensor.dtype == "BYTES" else 1, _NUMPY_OF_DTYPE.get(tensor.dtype, np.object_))
    with pytest.raises(InvalidRequest, match=f"^{tensor.name}: given .*allowed: nothing: {tensor.doc}"):
        request(PROMPT | {tensor.name: full})
    if tensor.dtype == "BYTES":
        request(PROMPT | {tensor.name: np.full(shape, b"", np.object_)})


def test_what_benchmark_suites_send_is_served() -> None:
    made = request(
        PROMPT | {"temperature": one(1e-6, np.float32), "top_p": one(1, np.float32), "max_tokens": one(9, np.int32)}
        | {"min_length": one(9, np.int32), "end_id": one(1048576, np.int32), "stream": one(True, np.bool_)},
        {"accumulate_tokens": True, "ignore_eos": True},
    )  # fmt: skip
    assert (made.sampling.max_tokens, made.sampling.min_tokens, made.stop_ids) == (9, 9, ())


def test_one_response_repeats_the_prompt_unless_told_otherwise_and_a_stream_does_not() -> None:
    assert request(PROMPT).prompt_text == "hello"
    assert request(PROMPT | {"stream": one(True, np.bool_)}).prompt_text is None
    assert request(PROMPT | {"exclude_input_in_output": one(True, np.bool_)}).output.exclude_input
    assert request({"input_ids": np.array([[1, 2]], np.int32)}).output.exclude_input
    with pytest.raises(InvalidRequest, match="exclude_input_in_output"):
        request({"input_ids": np.array([[1]], np.int32), "exclude_input_in_output": one(False, np.bool_)})


def test_log_probabilities_are_gathered_for_every_name_that_asks() -> None:
    for flag in ("return_logprobs", "return_cumulative_logprob", "return_log_probs"):
        assert request(PROMPT | {flag: one(True, np.bool_)}).sampling.logprobs == 0
    assert request(PROMPT).sampling.logprobs is None
    assert sampled(logprobs=3).sampling.logprobs == 3


def test_several_answers_are_asked_for_by_either_name() -> None:
    assert request(PROMPT).sampling.n == 1
    for name in ("n", "num_return_sequences"):
        assert request(PROMPT | {name: one(3, np.int32)}).sampling.n == 3
        assert sampled(**{name: 3}).sampling.n == 3


def test_a_prompts_log_probabilities_are_asked_for_by_flag_or_number() -> None:
    asked = request(PROMPT | {"return_prompt_logprobs": one(True, np.bool_)})
    assert (asked.sampling.prompt_logprobs, asked.output.prompt_logprobs) == (0, True)
    assert sampled(prompt_logprobs=3).sampling.prompt_logprobs == 3
    assert sampled(prompt_logprobs=3).output.prompt_logprobs
    assert (request(PROMPT).sampling.prompt_logprobs, request(PROMPT).output.prompt_logprobs) == (None, False)


def test_class_deadline_and_tenant_come_as_parameters_or_tensors() -> None:
    made = request(PROMPT, {"priority_class": "batch", "deadline_ms": 50, "tenant": "acme"})
    assert (made.priority, made.tenant, made.deadline_ns) == (PriorityClass.BATCH, "acme", 1_000 + 50_000_000)
    made = request(PROMPT | {"priority": text("interactive"), "deadline_ms": one(7, np.int64)})
    assert (made.priority, made.deadline_ns) == (PriorityClass.INTERACTIVE, 1_000 + 7_000_000)


def test_the_default_deadline_holds_for_requests_without_one() -> None:
    limits = replace(LIMITS, default_deadline_s=0.03)
    assert request(PROMPT, limits=limits).deadline_ns == 1_000 + 30_000_000
    assert request(PROMPT, {"deadline_ms": 50}, limits=limits).deadline_ns == 1_000 + 50_000_000


def test_a_chat_needs_no_text_and_goes_with_an_empty_one() -> None:
    messages = json.dumps([{"role": "user", "content": "hi"}])
    for arrays in ({"stream": one(False, np.bool_)}, {"text_input": text("")}):
        draft = decode("id", Inputs(arrays), {"messages": messages}, 0)
        assert draft.prompt.chat == messages
        assert draft.returns.output.exclude_input


def test_null_in_json_means_the_default() -> None:
    assert sampled(temperature=None, stop=None, seed=None).sampling.greedy


BAD_JSON = [
    ({"temperature": "warm"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": float("nan")}, "temperature"),
    ({"temperature": float("inf")}, "temperature"),
    ({"temperature": 1e300}, "temperature"),
    ({"max_tokens": 2.5}, "max_tokens"),
    ({"max_tokens": [3]}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"max_tokens": 96}, "max_tokens"),
    ({"min_tokens": 65}, "min_tokens"),
    ({"top_p": -0.1}, "top_p"),
    ({"min_p": -0.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**63}, "seed"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"stop": [1]}, "stop:"),
    ({"stop": ["x"] * 65}, "stop_words"),
    ({"bad_words": "toolongaword"}, "bad_words"),
    ({"stop_token_ids": list(range(17))}, "stop_token_ids"),
    ({"stop_token_ids": [1000]}, "stop_token_ids"),
    ({"end_id": 2**31}, "end_id"),
    ({"n": 0}, "n:"),
    ({"n": 129}, "n:"),
    ({"n": 2, "num_return_sequences": 3}, "n:"),
    ({"best_of": 2}, "best_of: given 2, allowed: 1, the value of n"),
    ({"best_of": 5, "n": 3}, "best_of: given 5, allowed: 3"),
    ({"use_beam_search": True}, "use_beam_search"),
    ({"guided_json": 3}, "guided_json"),
]


@pytest.mark.parametrize(("values", "name"), BAD_JSON, ids=lambda value: str(value)[:40])
def test_a_bad_value_is_refused_by_name(values: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        sampled(**values)
    assert str(refused.value).startswith(name)


def test_a_repeated_key_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="repeated key"):
        request(PROMPT | {"sampling_parameters": text('{"seed": 1, "seed": 2}')})


def test_deep_nesting_is_refused_and_not_a_crash() -> None:
    with pytest.raises(InvalidRequest, match="sampling_parameters"):
        request(PROMPT | {"sampling_parameters": text("[" * 100_000)})


BAD_ARRAYS: list[tuple[dict[str, Any], str]] = [
    ({"text_input": text(b"\xc3\x28")}, "text_input: given 'invalid UTF-8 at byte 0'"),
    ({"text_input": np.array([1.0])}, "text_input: given 'dtype float64'"),
    ({"text_input": text("a", "b")}, "text_input: given 'shape"),
    (PROMPT | {"max_tokens": np.array([3], np.int32)}, "max_tokens: given 'shape"),
    (PROMPT | {"stream": one(1, np.int32)}, "stream: given 'dtype int32'"),
    (PROMPT | {"beam_width": one(2, np.int32)}, "beam_width: given 2"),
    (PROMPT | {"length_penalty": one(0.5, np.float32)}, "length_penalty: given 0.5"),
    (PROMPT | {"return_generation_logits": one(True, np.bool_)}, "return_generation_logits: given True"),
    (PROMPT | {"something": one(1, np.int32)}, "something: given 'an unknown input'"),
    ({"input_ids": np.zeros((1, 0), np.int32)}, "input_ids"),
    ({"input_ids": np.full((1, 100), 5, np.int32)}, "input_ids: given '100 tokens', allowed: at most 99"),
    (PROMPT | {"priority": text("soon")}, "priority: given 'soon'"),
]


@pytest.mark.parametrize(("arrays", "message"), BAD_ARRAYS, ids=[message[:30] for _, message in BAD_ARRAYS])
def test_a_bad_tensor_is_refused_by_name(arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        request(arrays)
    assert str(refused.value).startswith(message)


def test_an_id_comes_by_the_protocol_or_among_the_parameters() -> None:
    for parameters in ({"request_id": "a"}, {"id": "a"}, {"request_id": "a", "id": "b"}):
        assert read_request_id("", parameters) == "a"
        assert read_request_id("carried", parameters) == "carried"
    assert read_request_id("", {}) == ""


BAD_PARAMETERS: list[dict[str, Any]] = [
    {"deadline_ms": 0},
    {"deadline_ms": "soon"},
    {"deadline_ms": 10**12},
    {"priority_class": 3},
    {"tenant": "x" * 129},
    {"tenant": 5},
    {"request_id": "x" * 257},
    {"id": 7},
    {"colour": "red"},
]


@pytest.mark.parametrize("parameters", BAD_PARAMETERS, ids=str)
def test_a_bad_parameter_is_refused(parameters: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        request(PROMPT, parameters)


@pytest.mark.parametrize("written", ["1_0", "\u0661", "\uff15", " 7", "7\n", "0x1", "1" * 400, "", "-", "1e", "nan"])
def test_a_number_is_written_in_digits_of_ascii_alone(written: str) -> None:
    for name in ("max_tokens", "temperature", "seed", "end_id", "logprobs", "length_penalty", "n"):
        with pytest.raises(InvalidRequest, match=f"^{name}: given"):
            sampled(**{name: written})
        with pytest.raises(InvalidRequest, match=f"^{name}: given"):
            request(PROMPT, {name: written})
    with pytest.raises(InvalidRequest, match="deadline_ms: given"):
        request(PROMPT, {"deadline_ms": written})
    with pytest.raises(InvalidRequest, match="stop_token_ids: given"):
        sampled(stop_token_ids=[written])


def test_numbers_as_texts_mean_what_they_say() -> None:
    made = request(PROMPT, {"max_tokens": "12", "temperature": "+.5e0", "seed": "007", "deadline_ms": "1500"})
    assert (made.sampling.max_tokens, made.sampling.temperature, made.sampling.seed) == (12, 0.5, 7)
    assert made.deadline_ns == 1_000 + 1_500_000_000


@pytest.mark.parametrize("name", ["max_tokens", "min_tokens", "top_k", "end_id", "seed", "logprobs", "deadline_ms"])
def test_a_number_beyond_its_type_is_refused_not_cut(name: str) -> None:
    beyond = 2**64 + 5
    for written in (beyond, str(beyond)):
        with pytest.raises(InvalidRequest, match=f"^{name}: given '?{beyond}"):
            request(PROMPT, {name: written})


def test_more_answers_than_the_engine_takes_at_once_are_refused_by_the_first_request_too() -> None:
    asked = PROMPT | {"sampling_parameters": text('{"n": 3}')}
    with pytest.raises(InvalidRequest, match="n: given 3, allowed: at most 2, the sequences"):
        request(asked, limits=replace(LIMITS, max_sequences=2))
    for unknown_or_enough in (0, 3):
        assert request(asked, limits=replace(LIMITS, max_sequences=unknown_or_enough)).sampling.n == 3


def test_neutral_values_of_other_servers_are_accepted() -> None:
    arrays = PROMPT | {
        "beam_width": one(1, np.int32),
        "length_penalty": one(1.0, np.float32),
        "return_context_logits": one(False, np.bool_),
        "pad_id": one(50_256, np.int32),
    }
    request(arrays)
    assert sampled(n=3, best_of=3).sampling.n == 3
    assert not sampled(skip_special_tokens=True).output.control_tokens
    assert sampled(skip_special_tokens=False).output.control_tokens
    sampled(n=1, best_of="1", early_stopping=False, skip_special_tokens=True, length_penalty=1.0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
names = st.sampled_from(["temperature", "top_k", "stop", "logprobs", "seed", "n", "stop_token_ids", "ignore_eos", "x"])


@given(st.dictionaries(names, json_values, max_size=4))
@settings(deadline=None)
def test_no_json_ends_in_anything_but_a_request_or_a_refusal(values: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidRequest):
        assert sampled(**values).sampling.max_tokens == 64


def test_bias_and_allowed_ids_come_as_tensors_as_json_and_as_parameters() -> None:
    expected = (((3, -2.5), (7, 100.0)), (9, 4))
    bias, allowed = {"7": 100, "3": "-2.5", "5": 0}, [9, 4, 9]
    tensors = {"logit_bias": text(json.dumps(bias)), "allowed_token_ids": np.array([allowed], np.int32)}
    ways = (
        request(PROMPT | tensors),
        sampled(logit_bias=bias, allowed_token_ids=allowed),
        request(PROMPT, {"logit_bias": json.dumps(bias), "allowed_token_ids": json.dumps(allowed)}),
        request(PROMPT | tensors, {"logit_bias": json.dumps(bias)}),
    )
    for made in ways:
        assert (made.logit_bias, made.allowed_token_ids) == expected
    nothing = sampled(logit_bias={}, allowed_token_ids=[])
    assert (nothing.logit_bias, nothing.allowed_token_ids) == ((), ())
    assert request(PROMPT | {"logit_bias": text("")}).logit_bias == ()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"logit_bias": [1]}, "logit_bias: given [1]"),
        ({"logit_bias": {"x": 1}}, "logit_bias: given 'x', allowed: a whole number"),
        ({"logit_bias": {"7": True}}, "logit_bias[7]: given True"),
        ({"logit_bias": {"7": -101}}, "logit_bias[7]: given -101.0, allowed: a number in [-100, 100]"),
        ({"logit_bias": {"7": 1, "07": 1}}, "logit_bias: given 'an id twice'"),
        ({"logit_bias": {"1000": 1}}, "logit_bias: given 1000, allowed: ids in 0..999"),
        ({"logit_bias": dict.fromkeys(range(301), 1)}, "logit_bias: given '301 ids'"),
        ({"logit_bias": "{"}, "logit_bias"),
        ({"allowed_token_ids": 3}, "allowed_token_ids: given 3"),
        ({"allowed_token_ids": [2**40]}, "allowed_token_ids: given 1099511627776"),
        ({"allowed_token_ids": [97], "bad_words": ["a"]}, "ends no bad word"),
        ({"allowed_token_ids": [2], "min_tokens": 1}, "allowed_token_ids: given [2]"),
    ],
    ids=str,
)
def test_a_wrong_bias_or_list_of_allowed_ids_is_refused_by_name(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        sampled(**values)
    assert words in str(caught.value)


def test_an_end_token_that_is_ignored_may_be_the_only_allowed_one() -> None:
    assert sampled(allowed_token_ids=[2], min_tokens=1, ignore_eos=True).allowed_token_ids == (2,)


AUTHORS = replace(LIMITS, sampling_defaults={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})


@pytest.mark.parametrize(
    ("asked", "dialect", "meant"),
    [
        ({}, OWN, (0.6, 20, 1.1)),
        ({"temperature": 0.0}, OWN, (0.0, 20, 1.1)),
        ({"top_k": -1, "repetition_penalty": 1.0}, OWN, (0.6, 0, 1.0)),
        ({"seed": 3}, OWN, (0.6, 20, 1.1)),
        ({}, VLLM, (0.6, 20, 1.1)),
        ({}, BLS, (0.6, 20, 1.1)),
        ({"temperature": 0.9}, BLS, (0.9, 20, 1.1)),
    ],
    ids=str,
)
def test_a_request_goes_before_the_models_authors_and_these_before_any_default(
    asked: dict[str, Any], dialect: Dialect, meant: tuple[float, int, float]
) -> None:
    arrays = {"text_input": text("x"), "sampling_parameters": text(json.dumps(asked))}
    draft = decode("id", Inputs(arrays), {}, 1, dialect=dialect)
    sampling = complete(draft, np.arange(5, dtype=np.int32), 1, AUTHORS).sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == meant
