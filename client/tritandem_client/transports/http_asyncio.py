"""HTTP for asyncio: one POST to a generate endpoint per request, connections pooled.

Owns the pool. Knows nothing about tensors or answers. Everything runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator

import httpx

from tritandem_client.answer import Outputs
from tritandem_client.errors import Cancelled, Timeout
from tritandem_client.request import WireRequest
from tritandem_client.results import Health
from tritandem_client.transports import Address, cancelled
from tritandem_client.transports import http_wire as wire


class AsyncHttpCall:
    """Sent when first read, because HTTP has no way to send without waiting for the headers."""

    def __init__(self, client: httpx.AsyncClient, message: httpx.Request, timeout_s: float | None) -> None:
        self._client, self._message = client, message
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._response: httpx.Response | None = None
        self._outputs = self._receive()
        self._reading: asyncio.Future[Outputs] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._cancelled = False

    def __aiter__(self) -> AsyncHttpCall:
        return self

    async def __anext__(self) -> Outputs:
        left_s = None if self._end_s is None else self._end_s - time.monotonic()
        try:
            self._reading = asyncio.ensure_future(anext(self._outputs))
            return await asyncio.wait_for(self._reading, left_s)
        except httpx.HTTPError as error:
            raise wire.from_http_error(error) from None
        except asyncio.TimeoutError:
            raise Timeout("no complete answer in time") from None
        except asyncio.CancelledError:
            if cancelled.the_call_was(self._cancelled):
                raise Cancelled("on this side") from None
            raise

    def cancel(self) -> None:
        self._cancelled = True
        if self._response is not None:
            wire.shut_down(self._response.extensions.get("network_stream"))  # now, however soon the loop ends
        if self._reading is not None and not self._reading.done():
            self._reading.cancel()  # it closes on its way out, and whoever waits for it is woken
        else:
            self._closing = asyncio.get_running_loop().create_task(self._close())

    async def _close(self) -> None:
        with contextlib.suppress(RuntimeError):  # a task is reading: it closes on its way out
            await self._outputs.aclose()

    async def _receive(self) -> AsyncGenerator[Outputs, None]:
        self._response = response = await self._client.send(self._message, stream=True)
        async with contextlib.aclosing(response):
            if response.status_code != 200:
                raise wire.from_status(response.status_code, await response.aread())
            if "event-stream" not in response.headers.get("content-type", ""):
                yield wire.to_outputs(wire.from_plain(await response.aread()))
                return
            decoder = wire.EventDecoder()
            async for data in response.aiter_bytes():
                for event in decoder.feed(data):
                    yield wire.to_outputs(event)


class AsyncHttpTransport:
    def __init__(self, address: Address) -> None:
        self._address = address
        self._client = httpx.AsyncClient(**wire.client_arguments(address))

    def open(self, request: WireRequest, timeout_s: float | None) -> AsyncHttpCall:
        timeout = wire.timeouts(self._address, timeout_s)
        message = self._client.build_request("POST", wire.path(request), json=wire.to_body(request), timeout=timeout)
        return AsyncHttpCall(self._client, message, timeout_s)

    async def health(self, model: str, timeout_s: float) -> Health:
        timeout = wire.timeouts(self._address, timeout_s)
        try:
            ready = await self._client.get("/v2/health/ready", timeout=timeout)
            model_ready = await self._client.get(f"/v2/models/{model}/ready", timeout=timeout)
            index = await self._client.post("/v2/repository/index", timeout=timeout)
        except httpx.HTTPError as error:
            return Health(live=False, ready=False, reason=str(wire.from_http_error(error)))
        return wire.to_health(ready, model_ready, index, model)

    async def close(self) -> None:
        await self._client.aclose()
