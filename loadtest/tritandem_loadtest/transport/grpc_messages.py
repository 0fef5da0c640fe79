"""Triton's inference protocol: a call as a ModelInferRequest, streamed responses as token counts.

Pure functions over protobuf messages; the two gRPC transports share them. Knows nothing about connections.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tritandem_client import tensors
from tritonclient.grpc import service_pb2

from ..config import LoadTestError
from ..dialects import Dialect, Tensor
from .interface import Call, Decoded

STREAM_PATH = "/inference.GRPCInferenceService/ModelStreamInfer"


def tensor_values(call: Call, dialect: Dialect, ignore_eos: bool) -> dict[Tensor, Any]:
    """Which tensors a call sends and what is in them. Raises LoadTestError for an option the dialect lacks."""
    options = {"stream": True, "max_tokens": call.max_tokens, **dialect.always, **call.options}
    if not parameters(call, dialect):
        options["prompt"] = call.prompt
    if ignore_eos:
        name, value = dialect.ignore_eos
        if not name:
            raise LoadTestError("this dialect has no way to ignore the end token")
        options[name] = value
    values: dict[Tensor, Any] = {}
    sampling: dict[str, Any] = {}
    for option, value in options.items():
        if option in dialect.tensors:
            values[dialect.tensors[option]] = value
        elif option in dialect.sampling_keys:
            sampling[dialect.sampling_keys[option]] = value
        else:
            raise LoadTestError(f"this dialect has no way to send {option!r}")
    if sampling:
        values[Tensor(dialect.sampling_tensor, "BYTES")] = json.dumps(sampling)
    return values


def parameters(call: Call, dialect: Dialect) -> dict[str, str]:
    """Custom request parameters: the messages of a chat, where the server applies its own template."""
    if not (call.messages and dialect.messages_parameter):
        return {}
    messages = [{"role": role, "content": text} for role, text in call.messages]
    return {dialect.messages_parameter: json.dumps(messages)}


def stage_times_ms(stamps_ns: Sequence[int], dialect: Dialect) -> dict[str, float]:
    """The server's stages that were reached. An answer of one token has no decode, and no zero in its place."""
    pairs = {stage: (stamps_ns[a], stamps_ns[b]) for stage, (a, b) in dialect.stages.items() if b < len(stamps_ns)}
    return {stage: (to_ns - from_ns) / 1e6 for stage, (from_ns, to_ns) in pairs.items() if 0 < from_ns < to_ns}


def encode(call: Call, dialect: Dialect, model: str, ignore_eos: bool) -> bytes:
    """The serialized ModelInferRequest."""
    request = service_pb2.ModelInferRequest(model_name=model, id=call.request_id)
    for tensor, value in tensor_values(call, dialect, ignore_eos).items():
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=dialect.shape)
        element = str(value) if tensor.datatype == "BYTES" else value
        request.raw_input_contents.append(tensors.encode(tensors.InputTensor(tensor.name, tensor.datatype, (element,))))
    for name, value_text in parameters(call, dialect).items():
        request.parameters[name].string_param = value_text
    return bytes(request.SerializeToString())


def decode(messages: list[tuple[int, bytes]], dialect: Dialect) -> Decoded:
    """Token counts by arrival. A response without the dialect's count tensor is one token if it carries text."""
    result = Decoded()
    stamps_ns: dict[str, int] = {}
    for arrived_ns, payload in messages:
        message = service_pb2.ModelStreamInferResponse.FromString(payload)
        if message.error_message:
            result.error = message.error_message
            continue
        response = message.infer_response
        tokens = -1
        has_text = False
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=False):
            name = output.name
            if name == dialect.count_output:
                tokens = _number(output.datatype, raw)
            elif name == dialect.text_output:
                has_text = len(raw) > 4
            elif name == dialect.input_count_output:
                result.input_tokens = _number(output.datatype, raw)
            elif name == dialect.cached_count_output:
                result.cached_tokens = _number(output.datatype, raw)
            elif name == dialect.stamps_output:
                result.server = stage_times_ms(tensors.decode(output.datatype, raw), dialect)
            elif name in dialect.stamp_outputs:
                stamps_ns[name] = _number(output.datatype, raw)
        if tokens < 0:
            tokens = 1 if has_text else 0
        if tokens:
            result.arrived_ns.append(arrived_ns)
            result.tokens.append(tokens)
    if stamps_ns:
        result.server = stage_times_ms([stamps_ns.get(name, 0) for name in dialect.stamp_outputs], dialect)
    return result


def _number(datatype: str, raw: bytes) -> Any:
    """The first element; 0 of an empty tensor."""
    return next(iter(tensors.decode(datatype, raw)), 0)
