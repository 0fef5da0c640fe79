"""Facades on a real server: the shapes, names and words that clients of other servers expect."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritandem.server import TritonServer

pytestmark = pytest.mark.triton

PROMPT = b"The capital of France is"
TYPES = {"O": "BYTES", "b": "BOOL", "i": "INT32", "u": "UINT64", "f": "FP32"}


def asked(
    server: TritonServer,
    model: str,
    arrays: Mapping[str, Any],
    outputs: tuple[str, ...] = (),
    request_id: str = "",
    parameters: dict[str, Any] | None = None,
) -> list[grpcclient.InferResult]:
    """Every response with tensors, over a stream as those clients open it. Raises InferenceServerException."""
    inputs = []
    for name, given in arrays.items():
        array = np.asarray(given)
        array = array.astype({"S": np.object_, "f": np.float32}.get(array.dtype.kind, array.dtype))
        array = array.astype(np.int32) if array.dtype == np.int64 else array
        inputs.append(grpcclient.InferInput(name, array.shape, TYPES[array.dtype.kind]))
        inputs[-1].set_data_from_numpy(array)
    got: Queue[tuple[Any, Any]] = Queue()
    wanted = [grpcclient.InferRequestedOutput(name) for name in outputs] or None
    results = []
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: got.put((result, error)))
        client.async_stream_infer(
            model, inputs, outputs=wanted, request_id=request_id, parameters=parameters,
            enable_empty_final_response=True,
        )  # fmt: skip
        while True:
            result, error = got.get(timeout=120)
            if error is not None:
                raise error
            results.append(result)
            if result.get_response().parameters["triton_final_response"].bool_param:
                return results


def text_of(results: list[grpcclient.InferResult]) -> str:
    return b"".join(result.as_numpy("text_output").reshape(-1)[0] for result in results).decode()


def posted(server: TritonServer, model: str, body: dict[str, Any]) -> dict[str, Any]:
    url = f"http://{server.http_url}/v2/models/{model}/generate"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=120) as response:
        return dict(json.load(response))


def test_the_vllm_backends_clients_need_no_batch_dimension(server: TritonServer) -> None:
    flags = ("finish_reason", "cumulative_logprob", "logprobs", "num_input_tokens", "num_output_tokens")
    arrays = {"text_input": [PROMPT], "stream": [True], "sampling_parameters": [b'{"temperature": "0"}']}
    results = asked(server, "vllm_model", arrays | {f"return_{flag}": [True] for flag in flags})
    assert sum(int(result.as_numpy("num_output_tokens")[0]) for result in results) == 16
    reasons = [result.as_numpy("finish_reason").tolist() for result in results]
    assert reasons == [[b"None"]] * (len(results) - 1) + [[b"length"]]
    assert {result.as_numpy("logprobs")[0] for result in results} == {b"null"}
    assert all(tuple(output.shape) == (1,) for result in results for output in result.get_response().outputs)
    arrays["stream"] = [False]
    [whole] = asked(server, "vllm_model", arrays)
    assert {output.name for output in whole.get_response().outputs} == {"text_output"}
    assert text_of([whole]) == PROMPT.decode() + text_of(results)


def test_parameters_over_http_may_be_texts(server: TritonServer) -> None:
    body = {"text_input": "1, 2, 3,", "parameters": {"temperature": "0", "stop": " 5", "max_tokens": "30"}}
    assert posted(server, "vllm_model", body)["text_output"] == "1, 2, 3, 4,"
    listed = {"text_input": "1, 2, 3,", "temperature": 0, "stop": '[" 5", " 6"]', "max_tokens": 30}
    assert posted(server, "vllm_model", listed)["text_output"] == "1, 2, 3, 4,"


@pytest.mark.parametrize("model", ["ensemble", "scheduler", "tensorrt_llm_bls"])
def test_what_benchmark_suites_send_is_served(server: TritonServer, model: str) -> None:
    body = {"accumulate_tokens": True, "text_input": "1, 2,", "temperature": 1e-6, "top_p": 0, "max_tokens": 5,
            "min_length": 5, "end_id": 1048576, "bad_words": "", "stop_words": ""}  # fmt: skip
    assert posted(server, model, body)["text_output"] == "1, 2, 3, 4"


def test_the_bls_models_clients_get_what_they_name_and_are_refused_by_name(server: TritonServer) -> None:
    arrays = {"text_input": [[PROMPT]], "max_tokens": [[2]], "temperature": [[1.0]]}
    for outputs in ((), ("text_output", "sequence_index", "context_logits", "kv_cache_alloc_new_blocks")):
        [result] = asked(server, "tensorrt_llm_bls", arrays, outputs)
        assert text_of([result]) == PROMPT.decode() + " Paris."
        assert result.as_numpy("sequence_index").tolist() == [[0]]
    with pytest.raises(grpcclient.InferenceServerException, match=r"REJECTED_INVALID: lora_task_id: .* no adapters"):
        asked(server, "tensorrt_llm_bls", arrays | {"lora_task_id": np.array([[1]], np.uint64)})


def test_ids_go_in_and_out_and_a_stop_ends_them(server: TritonServer) -> None:
    ids = np.array([[504, 3575, 282, 4649, 314]], np.int32)
    arrays = {"input_ids": ids, "input_lengths": [[5]], "request_output_len": [[3]]}
    outputs = ("output_ids", "sequence_length")
    results = asked(server, "tensorrt_llm", arrays | {"streaming": [[True]]}, outputs)
    streamed = [token for result in results for token in result.as_numpy("output_ids").reshape(-1).tolist()]
    [once] = asked(server, "tensorrt_llm", arrays, outputs)
    assert once.as_numpy("output_ids").tolist() == [[[*ids[0].tolist(), *streamed]]]
    assert once.as_numpy("sequence_length").tolist() == [[8]]
    stop = arrays | {"stop": [[True]]}
    [ended] = asked(server, "tensorrt_llm", stop, request_id="7", parameters={"Streaming": True})
    assert ended.as_numpy("finish_reason").tolist() == [b"cancelled"]


def test_the_llm_apis_names_are_taken(server: TritonServer) -> None:
    arrays = {"text_input": [[PROMPT]], "sampling_param_max_tokens": [[2]], "sampling_param_top_k": [[0]]}
    assert text_of(asked(server, "tensorrt_llm", arrays, ("text_output",))) == " Paris."
