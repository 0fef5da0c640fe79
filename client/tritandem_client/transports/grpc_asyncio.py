"""gRPC for asyncio: one ModelStreamInfer call per request on one shared connection.

Owns the channel, which is made on first use because it belongs to the running loop. Knows nothing about
tensors or answers. Everything runs on that loop's thread.
"""

from __future__ import annotations

import asyncio
from functools import cached_property
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tritandem_client.answer import Outputs
from tritandem_client.errors import Cancelled
from tritandem_client.request import WireRequest
from tritandem_client.results import Health
from tritandem_client.transports import Address, cancelled
from tritandem_client.transports import grpc_wire as wire


class AsyncGrpcCall:
    """A call of its own per request, so that cancelling one touches no other."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._responses = aiter(call)
        self._cancelled = False

    def __aiter__(self) -> AsyncGrpcCall:
        return self

    async def __anext__(self) -> Outputs:
        try:
            message = await anext(self._responses)
        except grpc.RpcError as error:
            raise wire.from_rpc_error(error) from None
        except asyncio.CancelledError:
            if cancelled.the_call_was(self._cancelled):
                raise Cancelled("on this side") from None
            raise
        return wire.from_message(message)

    def cancel(self) -> None:
        self._cancelled = True
        self._call.cancel()


class AsyncGrpcTransport:
    def __init__(self, address: Address) -> None:
        self._address = address
        self._metadata = wire.metadata(address)

    @cached_property
    def _channel(self) -> Any:
        options, secure = wire.channel_options(self._address), wire.credentials(self._address)
        if secure:
            return grpc.aio.secure_channel(self._address.host_port, secure, options)
        return grpc.aio.insecure_channel(self._address.host_port, options)

    @cached_property
    def _stub(self) -> Any:
        return service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def open(self, request: WireRequest, timeout_s: float | None) -> AsyncGrpcCall:
        """Send at once. The request side closes behind the one message, so the call ends with the answer."""
        messages = iter((wire.to_message(request),))
        return AsyncGrpcCall(self._stub.ModelStreamInfer(messages, timeout=timeout_s, metadata=self._metadata))

    async def health(self, model: str, timeout_s: float) -> Health:
        stub, options = self._stub, {"timeout": timeout_s, "metadata": self._metadata}
        try:
            ready = (await stub.ServerReady(pb.ServerReadyRequest(), **options)).ready
            model_ready = (await stub.ModelReady(pb.ModelReadyRequest(name=model), **options)).ready
        except grpc.RpcError as error:
            return Health(live=False, ready=False, reason=str(wire.from_rpc_error(error)))
        try:
            index = (await stub.RepositoryIndex(pb.RepositoryIndexRequest(), **options)).models
        except grpc.RpcError:  # closed to clients
            index = ()
        return wire.to_health(ready, model, model_ready, index)

    async def close(self) -> None:
        await self._channel.close()
