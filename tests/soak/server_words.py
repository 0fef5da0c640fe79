"""What a server says about its requests: the lines of its log and the counts of its metrics page."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

STARTED = "Started HTTPService"  # in Triton's log, once a run
_REQUEST_LINE = re.compile(r'\] "?(\{.*event.*request.*\})"?$')
_OUTCOME_METRIC = re.compile(r'^tritandem_requests_total\{outcome="(\w+)",.*\} (\d+)')


def outcome_counts(page: str) -> Counter[str]:
    """Finished requests by outcome, from a metrics page."""
    counts: Counter[str] = Counter()
    for line in page.splitlines():
        if found := _OUTCOME_METRIC.match(line):
            counts[found[1]] += int(found[2])
    return counts


def gauge(page: str, name: str) -> float:
    """The value of a metric without labels; nan when it is not there."""
    for line in page.splitlines():
        if line.startswith(name + " "):
            return float(line.split()[1])
    return float("nan")


def request_lines(log: Path) -> list[list[dict[str, Any]]]:
    """What the server wrote about every request that ended, run by run. Triton may wrap a line into a JSON string."""
    runs: list[list[dict[str, Any]]] = [[]]
    for line in log.read_text(errors="replace").splitlines():
        if STARTED in line:
            runs.append([])
        found = _REQUEST_LINE.search(line)
        if found is None:
            continue
        text = json.loads(f'"{found[1]}"') if found[1].startswith('{\\"') else found[1]
        document = json.loads(text)
        if document.get("event") == "request":
            runs[-1].append(document)
    return runs
