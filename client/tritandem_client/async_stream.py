"""One answer being received by an asyncio task: the twin of stream.py, same names, same rules.

Runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING

from tritandem_client.errors import TritandemClientError
from tritandem_client.receiving import Receiving
from tritandem_client.results import Chunk, Result
from tritandem_client.transports import AsyncCall

if TYPE_CHECKING:
    from typing_extensions import Self


class AsyncStream(Receiving[AsyncCall]):
    """Iterates over the chunks; cancels the request when closed, left, dropped early or its task is cancelled."""

    async def drain(self) -> Result:
        """Read to the end."""
        async for _ in self:
            pass
        return self.result

    async def close(self) -> None:
        """Cancel the request unless it has ended; afterwards iteration stops and `result` holds what had arrived."""
        self._abandon()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._answer.ended:
            try:
                if self._call is None:
                    self._call = self._open()
                chunk = self._answer.add(await anext(self._call))
            except StopAsyncIteration:
                self._answer.complete()
            except TritandemClientError as error:
                await asyncio.sleep(self._retry_delay_s(error))
            except BaseException:
                self._abandon()
                raise
            else:
                if chunk is not None:
                    return chunk
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._abandon()
