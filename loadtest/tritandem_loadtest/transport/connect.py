"""Chooses the transport of a run. Imports only the one that is used: grpcio and HTTP are not needed for the other."""

from __future__ import annotations

from ..config import LoadTestError, RunConfig
from ..dialects import DIALECTS
from .interface import Transport


def connect(config: RunConfig) -> Transport:
    """Raises LoadTestError for a dialect or a combination that does not exist. Nothing is sent yet."""
    if config.dialect not in DIALECTS:
        raise LoadTestError(f"dialect: given {config.dialect!r}, allowed: {', '.join(DIALECTS)}")
    dialect = DIALECTS[config.dialect]
    model = config.model or dialect.model
    if config.protocol == "openai":
        from .sse import OpenAi, SseTransport

        return SseTransport(config.url, OpenAi(model, config.ignore_eos))
    if config.protocol == "http":
        from .sse import SseTransport, TritonGenerate

        return SseTransport(config.url, TritonGenerate(dialect, model, config.ignore_eos))
    if config.grpc_client == "grpcio" or config.url.startswith("grpcs://"):
        from .grpc_io import GrpcioTransport

        return GrpcioTransport(config.url, dialect, model, config.connections, config.ignore_eos)
    from .grpc_wire import WireTransport

    return WireTransport(config.url, dialect, model, config.connections, config.ignore_eos)
