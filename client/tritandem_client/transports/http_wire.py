"""Requests, responses and errors in HTTP's terms, for both HTTP transports.

Owns the mapping to Triton's generate endpoints (JSON in, JSON or server-sent events out). Knows nothing
about pools or calls. No I/O, but for ending a connection.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import httpx

from tritandem_client.answer import Outputs
from tritandem_client.errors import (
    ConnectionFailed,
    Failed,
    Saturated,
    Timeout,
    TritandemClientError,
    error_from_server,
)
from tritandem_client.request import WireRequest
from tritandem_client.results import Health, health_of
from tritandem_client.transports import Address

_LISTS = frozenset(
    {"input_ids", "stop_words", "bad_words", "allowed_token_ids"}
)  # tensors of any length; all others are one value
_NOT_OUTPUTS = frozenset({"id", "model_name", "model_version"})


def client_arguments(address: Address) -> dict[str, Any]:
    """For httpx.Client and AsyncClient. Proxies of the environment are not used: a server is addressed directly."""
    return {
        "base_url": f"{'https' if address.tls else 'http'}://{address.host_port}",
        "headers": dict(address.headers),
        "verify": _tls_context(address.ca_file) if address.tls else False,
        "trust_env": False,
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=64),
    }


def _tls_context(ca_file: str | None) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)


def timeouts(address: Address, timeout_s: float | None) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=address.connect_timeout_s, pool=None)


def path(request: WireRequest) -> str:
    return f"/v2/models/{request.model}/{'generate_stream' if request.stream else 'generate'}"


def to_body(request: WireRequest) -> dict[str, Any]:
    """Keys that are no inputs of the model reach it as request parameters; so does the id, which has no field here."""
    tensors = {t.name: list(t.values) if t.name in _LISTS else t.values[0] for t in request.tensors}
    return {**tensors, **request.parameters, "request_id": request.request_id}


def to_outputs(event: dict[str, Any]) -> Outputs:
    """One response's tensors. Raises the error that it carries instead, if it does."""
    if "error" in event:
        raise error_from_server(str(event["error"]))
    return {n: v if isinstance(v, list) else [v] for n, v in event.items() if n not in _NOT_OUTPUTS}


class EventDecoder:
    """The bytes of an event stream in, its JSON documents out.

    Lines end at b"\\n" only; splitting text would also break at U+2028 and its like inside an answer.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield _document(line[5:])


def from_plain(body: bytes) -> dict[str, Any]:
    """The document of a response that is not an event stream; Triton sends early errors either way."""
    return _document(body.removeprefix(b"data:"))


def from_status(status: int, body: bytes) -> TritandemClientError:
    """What a refused request means. Bodies that are not Triton's are those of a proxy in front of it."""
    try:
        return error_from_server(str(from_plain(body)["error"]))
    except (Failed, KeyError):
        said = f"HTTP status {status}: {body[:200].decode(errors='replace')}"
    if status == 429:
        return Saturated(said)
    return ConnectionFailed(said) if status in (502, 503, 504) else Failed(said)


def from_http_error(error: httpx.HTTPError) -> TritandemClientError:
    if isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout):
        return Timeout(f"no complete answer in time: {type(error).__name__}")
    return ConnectionFailed(f"{type(error).__name__}: {error}")


def shut_down(connection: Any) -> None:
    """End a connection of httpcore's, whoever reads it now; None: there is none yet."""
    end = None if connection is None else connection.get_extra_info("socket")
    if end is not None:
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def to_health(ready: httpx.Response, model_ready: httpx.Response, index: httpx.Response, model: str) -> Health:
    entries = index.json() if index.status_code == 200 else []  # deployments may close the repository's interface
    return health_of(
        server_ready=ready.status_code == 200,
        model=model,
        model_ready=model_ready.status_code == 200,
        index=[(e["name"], e.get("state", ""), e.get("reason", "")) for e in entries],
    )


def _document(data: bytes) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise Failed(f"not a JSON object: {data[:200].decode(errors='replace')}")
    return document
