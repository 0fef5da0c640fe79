"""A Triton gRPC server in this process: the real protocol over a real socket, a scripted model behind it.

Strict: a tensor outside the schema, a wrong type or shape fails the test when the server closes; a method
nobody wrote answers UNIMPLEMENTED. What the model sees of cancellation is what Triton would see.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.fakes.triton_protocol import (
    MANY_VALUES,
    ONE_VALUE,
    FakeTriton,
    Model,
    Outputs,
    Received,
    elements,
    raw_tensor,
)


class FakeTritonGrpc(FakeTriton):
    """`with FakeTritonGrpc(model) as server:` listens on `server.url`; `server.visitors` knows who came."""

    protocol = "grpc"

    def __init__(self, model: Model, *, port: int = 0, workers: int = 16) -> None:
        super().__init__(model)
        # SO_REUSEPORT would let the servers of two tests share a port.
        self._server = grpc.server(ThreadPoolExecutor(workers), options=[("grpc.so_reuseport", 0)])
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(_Service(self), self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.url = f"127.0.0.1:{self.port}"

    def die(self) -> None:
        self._server.stop(grace=None).wait(10)

    def __enter__(self) -> FakeTritonGrpc:
        self._server.start()
        return self


class _Service(service_pb2_grpc.GRPCInferenceServiceServicer):
    def __init__(self, owner: FakeTritonGrpc) -> None:
        self._owner = owner

    def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        return pb.ServerReadyResponse(ready=self._owner.ready)

    def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
        state, _ = self._owner.models.get(request.name, ("", ""))
        return pb.ModelReadyResponse(ready=state == "READY")

    def RepositoryIndex(self, request: Any, context: Any) -> Any:  # noqa: N802
        if self._owner.index_closed:
            context.abort(grpc.StatusCode.UNAVAILABLE, "This protocol is restricted")
        answer = pb.RepositoryIndexResponse()
        for name, (state, reason) in self._owner.models.items():
            answer.models.add(name=name, version="1", state=state, reason=reason)
        return answer

    def ModelStreamInfer(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:  # noqa: N802
        for message in requests:
            try:
                received = _read(message, context)
            except BaseException as fault:
                self._owner.visitors.faults.append(fault)
                raise
            context.add_callback(received.gone.set)
            for said in self._owner.visitors.admit(received):
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
        inputs[tensor.name] = elements(wanted, raw)
        assert len(inputs[tensor.name]) == tensor.shape[1], f"{tensor.name}: shape and contents differ"
    chosen = {name: value.WhichOneof("parameter_choice") for name, value in message.parameters.items()}
    parameters = {name: getattr(message.parameters[name], choice) for name, choice in chosen.items()}
    return Received(message.model_name, message.id, inputs, parameters, dict(context.invocation_metadata()))


def _write(said: Outputs | Exception | None, request: Received) -> Any:
    if isinstance(said, Exception):
        return pb.ModelStreamInferResponse(error_message=str(said))
    response = pb.ModelInferResponse(model_name=request.model, id=request.request_id)
    for name, (datatype, values) in (said or {}).items():
        response.outputs.add(name=name, datatype=datatype, shape=[1, len(values)])
        response.raw_output_contents.append(raw_tensor(datatype, values))
    if said is None:
        response.parameters["triton_final_response"].bool_param = True
    return pb.ModelStreamInferResponse(infer_response=response)
