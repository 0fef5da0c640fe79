"""One answer being received by a thread: iterating over it, and waiting before a retry.

Belongs to the thread that iterates; `close` may come from any.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING

from tritandem_client.errors import TritandemClientError
from tritandem_client.receiving import Receiving
from tritandem_client.results import Chunk, Result
from tritandem_client.transports import Call

if TYPE_CHECKING:
    from typing_extensions import Self


class Stream(Receiving[Call]):
    """Iterates over the chunks; cancels the request when closed, left (`with`), interrupted or dropped early."""

    def drain(self) -> Result:
        """Read to the end."""
        for _ in self:
            pass
        return self.result

    def close(self) -> None:
        """Cancel the request unless it has ended; afterwards iteration stops and `result` holds what had arrived."""
        self._abandon()

    def __iter__(self) -> Iterator[Chunk]:
        return self

    def __next__(self) -> Chunk:
        while not self._answer.ended:
            try:
                if self._call is None:
                    self._call = self._open()
                chunk = self._answer.add(next(self._call))
            except StopIteration:
                self._answer.complete()
            except TritandemClientError as error:
                time.sleep(self._retry_delay_s(error))
            except BaseException:
                self._abandon()
                raise
            else:
                if chunk is not None:
                    return chunk
        raise StopIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
