"""What stands between Triton's thread and a plug: a call that never comes back is seen from outside."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol


class Plug(Protocol):
    def execute(self, requests: Sequence[Any]) -> None: ...

    def close(self) -> None: ...


class WatchedPlug:
    """`in_call` is entered for as long as the plug has Triton's thread."""

    def __init__(self, plug: Plug, in_call: AbstractContextManager[object]) -> None:
        self._plug, self._in_call = plug, in_call

    def execute(self, requests: Sequence[Any]) -> None:
        with self._in_call:
            self._plug.execute(requests)

    def close(self) -> None:
        self._plug.close()
