"""Requests, responses and errors in gRPC's terms, for both gRPC transports.

Owns the mapping to Triton's protocol messages and channel settings. Knows nothing about channels or
calls. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from tritandem_client.answer import Outputs
from tritandem_client.errors import (
    Cancelled,
    ConnectionFailed,
    Failed,
    InvalidRequest,
    Timeout,
    TritandemClientError,
    error_from_server,
)
from tritandem_client.request import WireRequest
from tritandem_client.results import Health, health_of
from tritandem_client.tensors import decode, encode
from tritandem_client.transports import Address


def channel_options(address: Address) -> list[tuple[str, int | str]]:
    """Every client has its own connection, and a server that comes back is found again within two seconds."""
    options: list[tuple[str, int | str]] = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", int(address.connect_timeout_s * 1000)),  # the time one attempt may take
        ("grpc.max_reconnect_backoff_ms", 2000),
    ]
    if address.round_robin:
        options.append(("grpc.lb_policy_name", "round_robin"))
    if address.keepalive_s is not None:
        interval_ms = int(address.keepalive_s * 1000)
        options += [
            ("grpc.keepalive_time_ms", interval_ms),
            ("grpc.keepalive_timeout_ms", interval_ms),
            ("grpc.http2.ping_timeout_ms", interval_ms),
            ("grpc.http2.max_pings_without_data", 0),  # a long prefill sends nothing
        ]
    return options


def credentials(address: Address) -> grpc.ChannelCredentials | None:
    if not address.tls:
        return None
    roots = None
    if address.ca_file is not None:
        with open(address.ca_file, "rb") as file:
            roots = file.read()
    return grpc.ssl_channel_credentials(root_certificates=roots)


def metadata(address: Address) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in address.headers.items())


def to_message(request: WireRequest) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name=request.model, id=request.request_id)
    for tensor in request.tensors:
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(encode(tensor))
    for name, value in request.parameters.items():
        if isinstance(value, bool):
            message.parameters[name].bool_param = value
        elif isinstance(value, int):
            message.parameters[name].int64_param = value
        else:
            message.parameters[name].string_param = value
    return message


def from_message(message: pb.ModelStreamInferResponse) -> Outputs:
    """The response's tensors. Raises the error that the message carries instead, if it does."""
    if message.error_message:
        raise error_from_server(message.error_message)
    response = message.infer_response
    return {
        output.name: decode(output.datatype, raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def from_rpc_error(error: Any) -> TritandemClientError:
    """What a failed call means. `error`: a grpc.RpcError that is also a grpc.Call."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return ConnectionFailed(details)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Timeout(f"no complete answer in time: {details}")
    if code is grpc.StatusCode.CANCELLED:
        return Cancelled(details)
    word = error_from_server(details)
    if isinstance(word, Failed) and code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest("request", message=details)
    return word


def to_health(server_ready: bool, model: str, model_ready: bool, index: Iterable[Any]) -> Health:
    """`index`: the repository's entries; none where a deployment closes the repository's interface."""
    entries = [(entry.name, entry.state, entry.reason) for entry in index]
    return health_of(server_ready=server_ready, model=model, model_ready=model_ready, index=entries)
