"""A Triton gRPC server in this process: the real protocol over a real socket, a scripted model behind it.

Strict: a tensor outside the schema, a wrong type or shape, or a method nobody scripted fails the test in
`close`. The model is a function that yields responses; what it sees of cancellation is what Triton would.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

LETTERS = {"BOOL": "?", "INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q", "FP32": "f"}
ONE_VALUE = {
    "text_input": "BYTES",
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "seed": "UINT64",
    "end_id": "INT32",
    "sampling_parameters": "BYTES",
    "stream": "BOOL",
    "stop": "BOOL",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_logprobs": "BOOL",
}
MANY_VALUES = {"input_ids": "INT32", "stop_words": "BYTES", "bad_words": "BYTES"}
PARAMETERS = {"messages": str, "priority_class": str, "deadline_ms": int, "tenant": str}


@dataclass
class Received:
    """One request as the model sees it; `gone` is set when its client has cancelled or vanished."""

    model: str
    request_id: str
    inputs: dict[str, list[Any]]
    parameters: dict[str, Any]
    metadata: dict[str, str]
    gone: threading.Event = field(default_factory=threading.Event)

    @property
    def is_stop(self) -> bool:
        return "stop" in self.inputs


Outputs = dict[str, tuple[str, list[Any]]]
Model = Callable[[Received], Iterator[Outputs | Exception | None]]
"""Yields output tensors; an Exception is answered as an error response with its text, None as an empty final one."""


class FakeTriton:
    """`with FakeTriton(model) as server:` listens on `server.url`; `server.received` lists every request."""

    def __init__(self, model: Model, *, port: int = 0, workers: int = 16) -> None:
        self.received: list[Received] = []
        self.arrived = threading.Condition()
        self.faults: list[BaseException] = []
        self.ready = True
        self.models = {"scheduler": ("READY", ""), "ensemble": ("READY", "")}
        self._model = model
        # SO_REUSEPORT would let two servers of two tests share a port.
        self._server = grpc.server(ThreadPoolExecutor(workers), options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Service(self), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        assert self.port, "the port is taken"
        self.url = f"127.0.0.1:{self.port}"

    def run(self, request: Received) -> Iterator[Outputs | Exception | None]:
        with self.arrived:
            self.received.append(request)
            self.arrived.notify_all()
        return self._model(request)

    def wait_for(self, wanted: Callable[[Received], bool], timeout_s: float = 10.0) -> Received:
        """The first request that fits, waiting for it to arrive."""
        with self.arrived:
            assert self.arrived.wait_for(lambda: any(map(wanted, self.received)), timeout_s), "no such request came"
            return next(filter(wanted, self.received))

    def die(self) -> None:
        """Cut every connection now, as a killed process would."""
        self._server.stop(grace=None).wait(10)

    def __enter__(self) -> FakeTriton:
        self._server.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.die()
        if self.faults:
            raise AssertionError("the client sent something wrong") from self.faults[0]


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, owner: FakeTriton) -> None:
        self._owner = owner

    def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerReadyResponse(ready=self._owner.ready)

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        answer = pb.RepositoryIndexResponse()
        for name, (state, reason) in self._owner.models.items():
            answer.models.add(name=name, version="1", state=state, reason=reason)
        return answer

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        for message in requests:
            try:
                received = _read(message, context)
            except BaseException as fault:
                self._owner.faults.append(fault)
                raise
            context.add_callback(received.gone.set)
            for said in self._owner.run(received):
                yield _write(said, received)


def _read(message: Any, context: Any) -> Received:
    inputs: dict[str, list[Any]] = {}
    assert len(message.inputs) == len(message.raw_input_contents), "every input travels raw"
    for tensor, raw in zip(message.inputs, message.raw_input_contents, strict=True):
        assert tensor.name not in inputs, f"{tensor.name} sent twice"
        wanted = ONE_VALUE.get(tensor.name) or MANY_VALUES.get(tensor.name)
        assert wanted is not None, f"unexpected tensor {tensor.name}"
        assert tensor.datatype == wanted, f"{tensor.name} is {tensor.datatype}, not {wanted}"
        batch, width = tensor.shape
        assert batch == 1, f"{tensor.name} has shape {tensor.shape}"
        assert tensor.name in MANY_VALUES or width == 1, f"{tensor.name} has shape {tensor.shape}"
        inputs[tensor.name] = _elements(wanted, raw)
        assert len(inputs[tensor.name]) == tensor.shape[1], f"{tensor.name}: shape and contents differ"
    parameters = {
        name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in message.parameters.items()
    }
    for name, value in parameters.items():
        assert isinstance(value, PARAMETERS[name]), f"unexpected parameter {name}={value!r}"
    if "messages" in parameters:
        assert json.loads(parameters["messages"]), "messages is a JSON list"
    metadata = dict(context.invocation_metadata())
    return Received(message.model_name, message.id, inputs, parameters, metadata)


def _elements(datatype: str, raw: bytes) -> list[Any]:
    if datatype != "BYTES":
        return [value for (value,) in struct.iter_unpack("<" + LETTERS[datatype], raw)]
    texts = []
    while raw:
        (length,) = struct.unpack_from("<I", raw)
        texts.append(raw[4 : 4 + length].decode())
        raw = raw[4 + length :]
    return texts


def _write(said: Outputs | Exception | None, request: Received) -> Any:
    if isinstance(said, Exception):
        return pb.ModelStreamInferResponse(error_message=str(said))
    response = pb.ModelInferResponse(model_name=request.model, id=request.request_id)
    for name, (datatype, values) in (said or {}).items():
        response.outputs.add(name=name, datatype=datatype, shape=[1, len(values)])
        if datatype == "BYTES":
            raw = b"".join(struct.pack("<I", len(v.encode())) + v.encode() for v in values)
        else:
            raw = struct.pack(f"<{len(values)}{LETTERS[datatype]}", *values)
        response.raw_output_contents.append(raw)
    if said is None:
        response.parameters["triton_final_response"].bool_param = True
    return pb.ModelStreamInferResponse(infer_response=response)
