"""gRPC for threads: one ModelStreamInfer call per request on one shared connection.

Owns the channel. Knows nothing about tensors or answers. Thread-safe: a call belongs to the thread that
reads it, and `cancel` may come from any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tritandem_client.answer import Outputs
from tritandem_client.request import WireRequest
from tritandem_client.results import Health
from tritandem_client.transports import Address
from tritandem_client.transports import grpc_wire as wire


class GrpcCall:
    """A call of its own per request, so that cancelling one touches no other."""

    def __init__(self, responses: Any) -> None:
        self._responses = responses

    def __iter__(self) -> Iterator[Outputs]:
        return self

    def __next__(self) -> Outputs:
        try:
            message = next(self._responses)
        except grpc.RpcError as error:
            raise wire.from_rpc_error(error) from None
        return wire.from_message(message)

    def cancel(self) -> None:
        self._responses.cancel()


class GrpcTransport:
    def __init__(self, address: Address) -> None:
        options, secure = wire.channel_options(address), wire.credentials(address)
        self._metadata = wire.metadata(address)
        self._channel = (
            grpc.secure_channel(address.host_port, secure, options)
            if secure
            else grpc.insecure_channel(address.host_port, options)
        )
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def open(self, request: WireRequest, timeout_s: float | None) -> GrpcCall:
        """Send at once. The request side closes behind the one message, so the call ends with the answer."""
        messages = iter((wire.to_message(request),))
        return GrpcCall(self._stub.ModelStreamInfer(messages, timeout=timeout_s, metadata=self._metadata))

    def health(self, model: str, timeout_s: float) -> Health:
        options = {"timeout": timeout_s, "metadata": self._metadata}
        try:
            ready = self._stub.ServerReady(pb.ServerReadyRequest(), **options).ready
            model_ready = self._stub.ModelReady(pb.ModelReadyRequest(name=model), **options).ready
        except grpc.RpcError as error:
            return Health(live=False, ready=False, reason=str(wire.from_rpc_error(error)))
        try:
            index = self._stub.RepositoryIndex(pb.RepositoryIndexRequest(), **options).models
        except grpc.RpcError:  # closed to clients
            index = ()
        return wire.to_health(ready, model, model_ready, index)

    def close(self) -> None:
        self._channel.close()
