"""Chooses the transport of a run."""

from __future__ import annotations

from ..config import RunConfig
from ..dialects import DIALECTS
from .grpc_h2 import H2Transport
from .grpc_io import GrpcioTransport
from .interface import Transport
from .sse import OpenAi, SseTransport, TritonGenerate


def connect(config: RunConfig) -> Transport:
    """Nothing is sent yet. Raises ValueError for a URL without a host or, for gRPC, without a port."""
    dialect = DIALECTS[config.dialect]
    model = config.model or dialect.model
    if config.protocol == "openai":
        return SseTransport(config.url, OpenAi(model, config.ignore_eos), config.headers)
    if config.protocol == "http":
        return SseTransport(config.url, TritonGenerate(dialect, model, config.ignore_eos), config.headers)
    kind = GrpcioTransport if config.grpc_client == "grpcio" else H2Transport
    return kind(config.url, dialect, model, config.connections, config.ignore_eos, config.headers)
