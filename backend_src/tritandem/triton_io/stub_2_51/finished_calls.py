"""Keeps finished decoupled calls until Triton's stub has dropped its own reference to them.

The stub drops it on a thread that holds no GIL, from a queue that may be long (log lines wait there too). Were
that reference the last one, Python objects would be freed there: Python 3.12 ends with signal 11, older ones
corrupt their heap. A question whether a request is cancelled waits in the same queue: an answer proves that
everything before it is done. May be called from any thread.
"""

from __future__ import annotations

import threading
from typing import Any, Protocol

MAX_QUESTIONS = 8


class Witness(Protocol):
    """A request that is still open."""

    def asked(self) -> bool:
        """Ask the stub about this request; True when the question went through its queue and was answered."""


class FinishedCalls:
    """`keep` what has ended; `settle` frees it once that is safe, with the help of any open request."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[Any] = []
        self._witnesses: dict[int, Witness] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def opened(self, witness: Witness) -> None:
        with self._lock:
            self._witnesses[id(witness)] = witness

    def closed(self, witness: Witness) -> None:
        with self._lock:
            self._witnesses.pop(id(witness), None)

    def keep(self, call: Any) -> None:
        """Read what is left of a call and keep it. One that nobody reads to its end is never cleaned up at all."""
        while next(call, None) is not None:  # `for` would begin anew with one that has ended
            pass
        with self._lock:
            self._kept.append(call)

    def settle(self) -> bool:
        """Wait for the clean-up of all that is kept and free it; False when no open request could be asked."""
        with self._lock:
            due = list(self._kept)
            witnesses = list(self._witnesses.values())[-MAX_QUESTIONS:]
        if not due:
            return True
        if not any(witness.asked() for witness in reversed(witnesses)):
            return False
        with self._lock:
            settled = {id(call) for call in due}
            self._kept = [call for call in self._kept if id(call) not in settled]
        return True
