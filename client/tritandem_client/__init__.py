"""A light client of Tritandem and of other language models behind Triton: `Client` and `AsyncClient`.

Transport libraries are imported when a client is made, not here.
"""

from tritandem_client.async_client import AsyncClient
from tritandem_client.async_stream import AsyncStream
from tritandem_client.client import Client
from tritandem_client.errors import (
    Cancelled,
    ConnectionFailed,
    DeadlineExpired,
    Failed,
    InvalidRequest,
    RequestError,
    Saturated,
    ServerNotReady,
    Stopped,
    Timeout,
    TransportError,
    TritandemClientError,
)
from tritandem_client.results import Choice, Chunk, Health, Result, Timings, TokenLogprob
from tritandem_client.stream import Stream

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Choice",
    "Chunk",
    "Client",
    "ConnectionFailed",
    "DeadlineExpired",
    "Failed",
    "Health",
    "InvalidRequest",
    "RequestError",
    "Result",
    "Saturated",
    "ServerNotReady",
    "Stopped",
    "Stream",
    "Timeout",
    "Timings",
    "TokenLogprob",
    "TransportError",
    "TritandemClientError",
]
