"""Stops that came before the request they name: its text was still on the way through the tokenizer.

Guarded by its owner's lock. Knows nothing about requests but their ids and when the server received them.
"""

from __future__ import annotations

from collections import OrderedDict

MAX_REMEMBERED = 4096


class EarlyStops:
    """When each id was last asked to stop; the oldest are forgotten first.

    A request is meant by a stop that came after it was received, and by no other: an id may be used again at once.
    """

    def __init__(self) -> None:
        self._stopped_ns: OrderedDict[str, int] = OrderedDict()

    def note(self, request_id: str, now_ns: int) -> None:
        self._stopped_ns[request_id] = now_ns
        self._stopped_ns.move_to_end(request_id)
        if len(self._stopped_ns) > MAX_REMEMBERED:
            self._stopped_ns.popitem(last=False)

    def mean(self, request_id: str, received_ns: int) -> bool:
        """Whether a request of this id, received then, has been stopped already."""
        return received_ns <= self._stopped_ns.get(request_id, -1)
