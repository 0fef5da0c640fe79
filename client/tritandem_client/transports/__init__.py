"""The ways to a server: what a transport is, and which one an address asks for.

Owns the two protocols that clients program against, and address parsing. Knows nothing about gRPC or
HTTP themselves: their libraries are imported when a client is made, so importing the package is cheap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tritandem_client.answer import Outputs
from tritandem_client.request import WireRequest
from tritandem_client.results import Health

ProtocolName = Literal["grpc", "http"]
_DEFAULT_PORTS: dict[ProtocolName, int] = {"grpc": 8001, "http": 8000}
_SCHEMES: dict[str, tuple[ProtocolName, bool]] = {
    "grpc": ("grpc", False),
    "grpcs": ("grpc", True),
    "http": ("http", False),
    "https": ("http", True),
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is and how to speak to it. `ca_file`: PEM roots instead of the system's."""

    protocol: ProtocolName
    host_port: str
    tls: bool = False
    ca_file: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    connect_timeout_s: float = 5.0
    keepalive_s: float | None = None
    round_robin: bool = False


class Call(Protocol):
    """One running request. Iterating gives the output tensors of each response and raises the package's errors."""

    def __iter__(self) -> Iterator[Outputs]: ...

    def __next__(self) -> Outputs: ...

    def cancel(self) -> None:
        """Stop receiving and tell the server so; callable from any thread, any number of times."""


class AsyncCall(Protocol):
    """The asyncio twin of Call."""

    def __aiter__(self) -> AsyncCall: ...

    async def __anext__(self) -> Outputs: ...

    def cancel(self) -> None:
        """As Call.cancel; from the event loop's thread. Does not wait."""


class Transport(Protocol):
    def open(self, request: WireRequest, timeout_s: float | None) -> Call: ...

    def health(self, model: str, timeout_s: float) -> Health: ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    def open(self, request: WireRequest, timeout_s: float | None) -> AsyncCall: ...

    async def health(self, model: str, timeout_s: float) -> Health: ...

    async def close(self) -> None: ...


def parse_url(url: str | None, protocol: ProtocolName | None) -> tuple[ProtocolName, str, bool]:
    """(protocol, host:port, whether TLS) of `host`, `host:port` or `grpc|grpcs|http|https://host:port`; the scheme
    decides unless `protocol` is given.

    Raises ValueError for an unknown scheme, or one that contradicts `protocol`.
    """
    scheme, _, rest = (url or "127.0.0.1").rpartition("://")
    implied, tls = _SCHEMES.get(scheme or (protocol or "grpc"), (None, False))
    if implied is None:
        raise ValueError(f"{url!r}: the scheme must be one of {', '.join(_SCHEMES)}, the protocol grpc or http")
    if protocol is not None and protocol != implied:
        raise ValueError(f"{url!r} contradicts protocol={protocol!r}")
    host = rest.rstrip("/")
    if ":" not in host.rpartition("]")[2]:
        host = f"{host}:{_DEFAULT_PORTS[implied]}"
    return implied, host, tls


def connect(address: Address) -> Transport:
    if address.protocol == "grpc":
        from tritandem_client.transports.grpc_sync import GrpcTransport

        return GrpcTransport(address)
    from tritandem_client.transports.http_sync import HttpTransport

    return HttpTransport(address)


def connect_async(address: Address) -> AsyncTransport:
    if address.protocol == "grpc":
        from tritandem_client.transports.grpc_asyncio import AsyncGrpcTransport

        return AsyncGrpcTransport(address)
    from tritandem_client.transports.http_asyncio import AsyncHttpTransport

    return AsyncHttpTransport(address)
