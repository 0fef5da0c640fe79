"""HTTP for threads: one POST to a generate endpoint per request.

Owns the pool. A stream has a connection of its own: httpx tells which one a request travels on when it is new, and
without it nobody could end a stream while its thread waits for the first token. Knows nothing about tensors or
answers. Thread-safe: a call belongs to the thread that reads it, and `cancel` may come from any other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any

import httpx

from tritandem_client.answer import Outputs
from tritandem_client.errors import Timeout
from tritandem_client.request import WireRequest
from tritandem_client.results import Health
from tritandem_client.transports import Address
from tritandem_client.transports import http_wire as wire


class HttpCall:
    """Sent when first read, because HTTP has no way to send without waiting for the headers.

    `timeout_s` is checked at every event and against silence, so a server that goes silent late is
    noticed after twice the time at most.
    """

    def __init__(self, client: httpx.Client, message: httpx.Request, timeout_s: float | None) -> None:
        self._client, self._message = client, message
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._connection: Any = None  # httpcore's, once it is made
        self._cancelled = False
        message.extensions["trace"] = self._note_connection
        self._outputs = self._receive()

    def __iter__(self) -> Iterator[Outputs]:
        return self

    def __next__(self) -> Outputs:
        try:
            return next(self._outputs)
        except httpx.HTTPError as error:
            raise wire.from_http_error(error) from None

    def cancel(self) -> None:
        self._cancelled = True
        wire.shut_down(self._connection)  # wakes a thread that waits for data
        with contextlib.suppress(ValueError):  # that thread closes it
            self._outputs.close()

    def _note_connection(self, event: str, info: Mapping[str, Any]) -> None:
        """httpx tells every step of a request, among them the new connection: plain, then perhaps inside TLS."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._connection = info["return_value"]
            if self._cancelled:  # while it was being made
                wire.shut_down(self._connection)

    def _receive(self) -> Generator[Outputs, None, None]:
        response = self._client.send(self._message, stream=True)
        with contextlib.closing(response):
            if response.status_code != 200:
                raise wire.from_status(response.status_code, response.read())
            if "event-stream" not in response.headers.get("content-type", ""):
                yield wire.to_outputs(wire.from_plain(response.read()))
                return
            decoder = wire.EventDecoder()
            for data in response.iter_bytes():
                for event in decoder.feed(data):
                    if self._end_s is not None and time.monotonic() > self._end_s:
                        raise Timeout("no complete answer in time")
                    yield wire.to_outputs(event)


class HttpTransport:
    def __init__(self, address: Address) -> None:
        self._address = address
        arguments = wire.client_arguments(address)
        self._client = httpx.Client(**arguments)
        self._streams = httpx.Client(**{**arguments, "limits": httpx.Limits(max_keepalive_connections=0)})

    def open(self, request: WireRequest, timeout_s: float | None) -> HttpCall:
        client = self._streams if request.stream else self._client
        timeout = wire.timeouts(self._address, timeout_s)
        message = client.build_request("POST", wire.path(request), json=wire.to_body(request), timeout=timeout)
        return HttpCall(client, message, timeout_s)

    def health(self, model: str, timeout_s: float) -> Health:
        timeout = wire.timeouts(self._address, timeout_s)
        try:
            ready = self._client.get("/v2/health/ready", timeout=timeout)
            model_ready = self._client.get(f"/v2/models/{model}/ready", timeout=timeout)
            index = self._client.post("/v2/repository/index", timeout=timeout)
        except httpx.HTTPError as error:
            return Health(live=False, ready=False, reason=str(wire.from_http_error(error)))
        return wire.to_health(ready, model_ready, index, model)

    def close(self) -> None:
        self._client.close()
        self._streams.close()
