"""AsyncClient behind the interface of Client, so that one test claims the same of both."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from tritandem_client import AsyncClient, AsyncStream


class BlockingAsyncClient:
    def __init__(self, url: str, **settings: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._client = AsyncClient(url, **settings)

    def run(self, awaitable: Awaitable[Any]) -> Any:
        return self._loop.run_until_complete(awaitable)

    def generate(self, *args: Any, **options: Any) -> Any:
        return self.run(self._client.generate(*args, **options))

    def chat(self, *args: Any, **options: Any) -> Any:
        return self.run(self._client.chat(*args, **options))

    def stop(self, request_id: str) -> None:
        self.run(self._client.stop(request_id))

    def health(self) -> Any:
        return self.run(self._client.health())

    def wait_ready(self, timeout_s: float) -> Any:
        return self.run(self._client.wait_ready(timeout_s))

    def stream(self, *args: Any, **options: Any) -> BlockingStream:
        return BlockingStream(self, self.run(_inside(self._client.stream, args, options)))

    def chat_stream(self, *args: Any, **options: Any) -> BlockingStream:
        return BlockingStream(self, self.run(_inside(self._client.chat_stream, args, options)))

    def close(self) -> None:
        self.run(self._client.close())

    def __enter__(self) -> BlockingAsyncClient:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
        self.run(self._loop.shutdown_asyncgens())
        self._loop.close()


class BlockingStream:
    def __init__(self, client: BlockingAsyncClient, stream: AsyncStream) -> None:
        self._client, self._stream = client, stream

    @property
    def request_id(self) -> str:
        return self._stream.request_id

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def result(self) -> Any:
        return self._stream.result

    def close(self) -> None:
        self._client.run(self._stream.close())

    def __iter__(self) -> BlockingStream:
        return self

    def __next__(self) -> Any:
        try:
            return self._client.run(_next(self._stream))
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> BlockingStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


async def _next(stream: AsyncStream) -> Any:
    return await anext(stream)


async def _inside(make: Any, args: Any, options: Any) -> AsyncStream:
    return make(*args, **options)
