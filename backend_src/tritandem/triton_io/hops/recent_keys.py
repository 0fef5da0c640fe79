"""Keys that were seen lately, a bounded number of them. Any thread."""

from __future__ import annotations

import threading
from collections import OrderedDict


class RecentKeys:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._keys: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        """Asking keeps it."""
        with self._lock:
            if key not in self._keys:
                return False
            self._keys.move_to_end(key)
            return True

    def add(self, key: str) -> None:
        with self._lock:
            self._keys[key] = None
            self._keys.move_to_end(key)
            if len(self._keys) > self._limit:
                self._keys.popitem(last=False)
