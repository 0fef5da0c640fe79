"""What the front counts and writes down: one line a request, and counters by endpoint and outcome.

The workers of a server share the counters: memory that all map, a row of numbers for each worker; whichever worker is
asked adds them up. Only its owner writes a row.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from contextlib import suppress
from typing import Any

from ..contracts.errors import Outcome
from ..contracts.printable import escaped

MAX_WORKERS = 64
MAX_NAMED = 1000  # unknown fields that are named in the log
OTHER = "other"
NAME = "tritandem_openai_requests_total"
_NUMBER = 8


class Books:
    """`fd`: of the memory that all workers share; -1 for a worker that is alone."""

    def __init__(self, endpoints: tuple[str, ...], fd: int = -1, worker: int = 0) -> None:
        self._columns = [(endpoint, outcome.value) for endpoint in (*endpoints, OTHER) for outcome in Outcome]
        self._index = {column: number for number, column in enumerate(self._columns)}
        size = MAX_WORKERS * len(self._columns) * _NUMBER
        if fd >= 0:
            os.ftruncate(fd, size)
        self._memory = memoryview(mmap.mmap(fd, size)).cast("Q")
        self._row = worker * len(self._columns)
        self._named: set[str] = set()

    def note(self, endpoint: str, outcome: Outcome, **line: Any) -> None:
        """A request has ended."""
        column = (endpoint, outcome.value)
        self._memory[self._row + self._index.get(column, self._index[(OTHER, outcome.value)])] += 1
        self.write({"event": "openai_request", "endpoint": endpoint, "outcome": outcome.value, **line})

    def name_unknown(self, fields: tuple[str, ...]) -> None:
        """Once for each field."""
        for field in fields:
            if field not in self._named and len(self._named) < MAX_NAMED:
                self._named.add(field)
                self.write({"event": "openai_unknown_field", "field": field})

    def write(self, line: dict[str, Any]) -> None:
        """A log that cannot be written is no reason not to serve."""
        with suppress(OSError, ValueError):
            sys.stdout.write(escaped(json.dumps(line, ensure_ascii=False)) + "\n")
            sys.stdout.flush()

    def metrics(self) -> str:
        """In Prometheus' text format, over all workers."""
        lines = [f"# HELP {NAME} Requests at the OpenAI API by endpoint and outcome.", f"# TYPE {NAME} counter"]
        for number, (endpoint, outcome) in enumerate(self._columns):
            total = sum(self._memory[number :: len(self._columns)])
            lines.append(f'{NAME}{{endpoint="{endpoint}",outcome="{outcome}"}} {total}')
        return "\n".join(lines) + "\n"
