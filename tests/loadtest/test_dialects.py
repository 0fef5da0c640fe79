"""What each dialect puts on the wire, tensor by tensor."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tritandem_loadtest.config import LoadTestError
from tritandem_loadtest.dialects import DIALECTS
from tritandem_loadtest.transport.grpc_messages import decode, encode, stage_times_ms
from tritandem_loadtest.transport.interface import Call
from tritandem_loadtest.transport.sse import OpenAi, TritonGenerate
from tritonclient.grpc import service_pb2


def sent(
    dialect: str, call: Call, ignore_eos: bool = False
) -> tuple[dict[str, tuple[str, list[int]]], dict[str, bytes]]:
    data = encode(call, DIALECTS[dialect], "model", ignore_eos)
    request = service_pb2.ModelInferRequest.FromString(data)
    kinds = {tensor.name: (tensor.datatype, list(tensor.shape)) for tensor in request.inputs}
    names = [tensor.name for tensor in request.inputs]
    return kinds, dict(zip(names, request.raw_input_contents, strict=True))


CALL = Call("id", "hi", 7, {"temperature": 0.5})


def test_tritandem_sends_limits_as_tensors_and_the_rest_as_sampling_parameters() -> None:
    kinds, raw = sent("tritandem", CALL, ignore_eos=True)
    assert kinds["text_input"] == ("BYTES", [1, 1])
    assert kinds["return_num_output_tokens"] == ("BOOL", [1, 1])
    assert raw["max_tokens"] == (7).to_bytes(4, "little")
    assert json.loads(raw["sampling_parameters"][4:]) == {"temperature": 0.5, "ignore_eos": True}


def test_trtllm_has_no_json_and_ends_never_by_an_impossible_end_id() -> None:
    kinds, raw = sent("trtllm", CALL, ignore_eos=True)
    assert "sampling_parameters" not in kinds
    assert kinds["temperature"] == ("FP32", [1, 1])
    assert raw["end_id"] == b"\xff\xff\xff\xff"


def test_vllm_has_no_batch_dimension_and_puts_max_tokens_into_its_json() -> None:
    kinds, raw = sent("vllm", CALL)
    assert kinds["text_input"] == ("BYTES", [1])
    assert "max_tokens" not in kinds
    assert json.loads(raw["sampling_parameters"][4:]) == {"max_tokens": 7, "temperature": 0.5}


def test_an_option_that_a_dialect_cannot_send_is_refused() -> None:
    with pytest.raises(LoadTestError, match="'min_p'"):
        sent("trtllm", Call("id", "hi", 7, {"min_p": 0.1}))


def test_a_chat_travels_as_messages_where_the_server_has_a_template() -> None:
    call = Call("id", "User: hi", 7, {}, (("user", "hi"),))
    request = service_pb2.ModelInferRequest.FromString(encode(call, DIALECTS["tritandem"], "model", False))
    assert "text_input" not in {tensor.name for tensor in request.inputs}
    assert json.loads(request.parameters["messages"].string_param) == [{"role": "user", "content": "hi"}]
    _, raw = sent("vllm", call)
    assert raw["text_input"][4:] == b"User: hi"


def test_http_bodies_use_the_same_names() -> None:
    path, body = TritonGenerate(DIALECTS["vllm"], "vllm_model", False).request(CALL)
    assert path == "/v2/models/vllm_model/generate_stream"
    assert (body["text_input"], body["stream"]) == ("hi", True)
    assert json.loads(body["sampling_parameters"])["max_tokens"] == 7


def test_openai_chats_and_completions_go_to_their_endpoints() -> None:
    endpoint = OpenAi("m", ignore_eos=True)
    path, body = endpoint.request(CALL)
    assert (path, body["prompt"], body["temperature"], body["ignore_eos"]) == ("/v1/completions", "hi", 0.5, True)
    path, body = endpoint.request(Call("id", "x", 7, {}, (("user", "hi"),)))
    assert (path, body["messages"]) == ("/v1/chat/completions", [{"role": "user", "content": "hi"}])


def response(outputs: dict[str, tuple[str, bytes]], error: str = "") -> bytes:
    message: Any = service_pb2.ModelStreamInferResponse(error_message=error)
    for name, (datatype, raw) in outputs.items():
        message.infer_response.outputs.add(name=name, datatype=datatype, shape=[1])
        message.infer_response.raw_output_contents.append(raw)
    return bytes(message.SerializeToString())


def test_a_response_with_text_and_no_count_is_one_token_and_an_empty_one_is_none() -> None:
    text = {"text_output": ("BYTES", b"\2\0\0\0hi")}
    nothing = {"text_output": ("BYTES", b"\0\0\0\0")}
    decoded = decode([(10, response(text)), (20, response(text)), (30, response(nothing))], DIALECTS["trtllm"])
    assert (decoded.arrived_ns, decoded.tokens) == ([10, 20], [1, 1])


def test_counts_come_from_the_server_where_it_sends_them() -> None:
    text = ("BYTES", b"\0\0\0\0")  # a token may have no text yet, such as half an emoji
    messages = [(10, response({"text_output": text, "num_output_tokens": ("UINT32", b"\3\0\0\0")}))]
    assert decode(messages, DIALECTS["vllm"]).tokens == [3]


def test_an_answer_of_one_token_has_no_decode() -> None:
    stamps_ms = [1, 2, 3, 4, 5, 9, 9, 10, 11]
    one, two = [[ms * 1_000_000 for ms in times] for times in (stamps_ms, [*stamps_ms[:6], 14, 10, 15])]
    stages = stage_times_ms(one, DIALECTS["tritandem"])
    steps = {"tokenize": 1.0, "queue": 1.0, "engine queue": 2.0, "prefill": 4.0, "first send": 1.0}
    assert stages == {**steps, "last wait": 2.0, "whole": 10.0}
    assert stage_times_ms(two, DIALECTS["tritandem"]) == {**steps, "decode": 5.0, "last wait": 1.0, "whole": 14.0}
