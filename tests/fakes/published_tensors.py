"""The public tensors of other Triton LLM deployments, and a gRPC server that takes and sends exactly these.

Sources: TensorRT-LLM, `triton_backend/all_models/inflight_batcher_llm/ensemble/config.pbtxt` and
`triton_backend/all_models/llmapi/tensorrt_llm/config.pbtxt`, before the move of `seed` the same ensemble in
tensorrtllm_backend; Triton's vLLM backend, `src/model.py` (`auto_complete_config`). Only tensors of text generation.
"""

from __future__ import annotations

import asyncio
import json
import struct
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tritonclient.grpc import service_pb2 as pb

from tests.fakes.raw_grpc_server import RawGrpcConnection

_FORMATS = {"INT32": "<i", "UINT32": "<I", "INT64": "<q", "UINT64": "<Q", "FP32": "<f", "BOOL": "<?"}


@dataclass(frozen=True)
class Published:
    """Input and output tensors: name -> datatype. `batched`: the first dimension of every tensor is the batch."""

    model: str
    batched: bool
    required: tuple[str, ...]
    inputs: dict[str, str]
    outputs: dict[str, str]

    @property
    def shape(self) -> list[int]:
        return [1, 1] if self.batched else [1]


def _typed(**names: str) -> dict[str, str]:
    """`_typed(BOOL="stream stop")` -> `{"stream": "BOOL", "stop": "BOOL"}`."""
    return {name: datatype for datatype, listed in names.items() for name in listed.split()}


def _ensemble(seed: str, min_tokens: str, counts: str, perf: str) -> Published:
    return Published(
        model="ensemble",
        batched=True,
        required=("text_input", "max_tokens"),
        inputs=_typed(
            BYTES="text_input bad_words stop_words",
            INT32=f"max_tokens end_id pad_id top_k beam_width num_return_sequences {min_tokens}",
            FP32=f"{_PENALTIES} temperature top_p length_penalty repetition_penalty",
            BOOL=f"stream exclude_input_in_output return_log_probs {counts} {perf}",
            UINT64=seed,
        ),
        outputs=_typed(
            BYTES="text_output",
            FP32="cum_log_probs",
            INT32=counts.replace("return_", ""),
            INT64=" ".join(_PERF_STAMPS) if perf else "",
        ),
    )


_PENALTIES = "presence_penalty frequency_penalty"
_PERF_STAMPS = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
_COUNTS = "return_num_input_tokens return_num_output_tokens"
PUBLISHED = {
    "trtllm": _ensemble("seed", "min_tokens", _COUNTS, "return_perf_metrics"),
    "trtllm-legacy": _ensemble("random_seed", "min_length", "", ""),
    "trtllm-llmapi": Published(
        model="tensorrt_llm",
        batched=False,
        required=("text_input",),
        inputs=_typed(
            BYTES="text_input sampling_param_stop",
            INT32="sampling_param_max_tokens sampling_param_top_k sampling_param_best_of",
            FP32="sampling_param_temperature sampling_param_top_p "
            "sampling_param_presence_penalty sampling_param_frequency_penalty",
            BOOL="streaming sampling_param_exclude_input_from_output return_finish_reason return_stop_reason",
            UINT64="sampling_param_seed",
        ),
        outputs=_typed(BYTES="text_output finish_reason stop_reason", FP32="cumulative_logprob"),
    ),
    "vllm": Published(
        model="vllm_model",
        batched=False,
        required=("text_input",),
        inputs=_typed(
            BYTES="text_input image sampling_parameters",
            BOOL=f"stream exclude_input_in_output {_COUNTS} "
            "return_finish_reason return_logprobs return_cumulative_logprob",
        ),
        outputs=_typed(
            BYTES="text_output finish_reason logprobs",
            FP32="cumulative_logprob",
            UINT32="num_input_tokens num_output_tokens",
        ),
    ),
}


@dataclass
class PublishedServer:
    """`with PublishedServer(PUBLISHED["vllm"]) as server`: refuses what the deployment would, then streams tokens.

    Every third token has no text yet, as when it is a part of a character; only a count can tell that it came.
    """

    published: Published
    requests: list[dict[str, Any]] = field(default_factory=list)  # the inputs of each, decoded
    url: str = ""

    def __enter__(self) -> PublishedServer:
        self._loop = asyncio.new_event_loop()
        self._connections: list[RawGrpcConnection] = []

        def connection() -> RawGrpcConnection:
            self._connections.append(RawGrpcConnection(self._answer))
            return self._connections[-1]

        listening = self._loop.run_until_complete(self._loop.create_server(connection, "127.0.0.1", 0))
        self.url = f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        self._listening = listening
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _close(self) -> None:
        """Leaves no open transport and no pending task behind, whether or not clients have hung up."""
        self._listening.close()
        for connection in self._connections:
            connection.transport.abort()
        await asyncio.sleep(0)  # connections learn of it and cancel their streams
        running = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, payload: bytes, received_ns: int) -> AsyncIterator[bytes]:
        request = pb.ModelInferRequest.FromString(payload)
        try:
            values = self._read(request)
        except ValueError as error:
            yield pb.ModelStreamInferResponse(error_message=str(error)).SerializeToString()
            return
        self.requests.append(values)
        limits = {**values, **json.loads(values.get("sampling_parameters", "{}"))}
        max_tokens = next(value for name, value in limits.items() if name.endswith("max_tokens"))
        so_far = ""
        for number in range(max_tokens):
            await asyncio.sleep(0.003)
            text = "" if number % 3 == 1 and "num_output_tokens" in self.published.outputs else " word"
            so_far += text
            whole = self.published.model == "tensorrt_llm"
            yield self._response(request, values, so_far if whole else text, final=number == max_tokens - 1)

    def _read(self, request: pb.ModelInferRequest) -> dict[str, Any]:
        """Raises ValueError for anything that the published configuration does not allow."""
        if request.model_name != self.published.model:
            raise ValueError(f"Request for unknown model: '{request.model_name}' is not found")
        values: dict[str, Any] = {}
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            wanted = self.published.inputs.get(tensor.name)
            if wanted != tensor.datatype:
                raise ValueError(f"unexpected inference input '{tensor.name}' of type {tensor.datatype}, not {wanted}")
            if list(tensor.shape) != self.published.shape:
                raise ValueError(f"unexpected shape {list(tensor.shape)} for input '{tensor.name}'")
            layout = _FORMATS.get(tensor.datatype)
            values[tensor.name] = struct.unpack(layout, raw)[0] if layout else raw[4:].decode()
        missing = set(self.published.required) - set(values)
        if missing:
            raise ValueError(f"expected inputs {self.published.required}, missing {missing}")
        return values

    def _response(self, request: pb.ModelInferRequest, values: dict[str, Any], text: str, final: bool) -> bytes:
        message = pb.ModelStreamInferResponse()
        inner = message.infer_response
        inner.model_name, inner.id = request.model_name, request.id
        outputs: dict[str, Any] = {"text_output": text}
        if values.get("return_num_input_tokens"):
            outputs["num_input_tokens"] = len(values["text_input"].split())
        if values.get("return_num_output_tokens"):
            outputs["num_output_tokens"] = 1
        if values.get("return_perf_metrics") and final:
            outputs |= zip(_PERF_STAMPS, (5_000_000, 7_000_000, 17_000_000, 57_000_000), strict=True)
        for name, value in outputs.items():
            datatype = self.published.outputs[name]
            inner.outputs.add(name=name, datatype=datatype, shape=self.published.shape)
            encoded = str(value).encode()
            is_text = datatype == "BYTES"
            raw = struct.pack("<I", len(encoded)) + encoded if is_text else struct.pack(_FORMATS[datatype], value)
            inner.raw_output_contents.append(raw)
        inner.parameters["triton_final_response"].bool_param = final
        return message.SerializeToString()
