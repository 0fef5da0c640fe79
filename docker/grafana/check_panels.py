"""Asks a Prometheus for every panel of the dashboard: `check_panels.py --prometheus URL [--minutes 15]`

Prints which panels have data, how many series, and their newest values. Exit code 1 when a query fails, and, with
`--all`, when a panel shows nothing that needs no GPU and no slow tokenizer. Standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parent / "dashboards" / "tritandem.json"
POINTS = 120  # of each series
RATE_WINDOW_S = 60
# What Grafana puts in when every server is selected.
SELECTED = ".*"
# What stays empty without a GPU: rows, and panels of other rows.
GPU_ROWS, GPU_PANELS = frozenset({"GPU"}), frozenset({"Step launch latency", "Staging"})
# What stays empty as long as the fast tokenizer is in use, which needs no cache.
SLOW_TOKENIZER_PANELS = frozenset({"Tokenizer's prefix cache"})


class QueryFailed(Exception):
    """Prometheus's words about a query, or about why it cannot be asked."""


@dataclass(frozen=True)
class Series:
    legend: str
    values: list[float]  # NaN where there is none


@dataclass(frozen=True)
class Panel:
    row: str
    title: str
    queries: list[tuple[str, str]]  # (legend, PromQL)


@dataclass
class Answer:
    panel: Panel
    series: list[Series] = field(default_factory=list)
    error: str = ""


def read_panels(dashboard: Path = DASHBOARD) -> Iterator[Panel]:
    row = ""
    for panel in json.loads(dashboard.read_text())["panels"]:
        if panel["type"] == "row":
            row = panel["title"]
            continue
        yield Panel(row, panel["title"], [(target["legendFormat"], target["expr"]) for target in panel["targets"]])


def ask(prometheus: str, panel: Panel, start_s: float, end_s: float) -> Answer:
    """Every series of a panel within a span of time."""
    answer = Answer(panel)
    try:
        for legend, query in panel.queries:
            for found in query_range(prometheus, query, start_s, end_s):
                values = [float(value) for _, value in found["values"]]
                if any(not math.isnan(value) for value in values):
                    answer.series.append(Series(filled(legend, found["metric"]), values))
    except QueryFailed as error:
        answer.error = str(error)
    return answer


def query_range(prometheus: str, query: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
    """Raises QueryFailed."""
    concrete = query.replace("$__rate_interval", f"{RATE_WINDOW_S}s").replace("$instance", SELECTED)
    fields = {"query": concrete, "start": start_s, "end": end_s, "step": max(1.0, (end_s - start_s) / POINTS)}
    url = f"{prometheus.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(fields)}"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            result: list[dict[str, Any]] = json.load(response)["data"]["result"]
            return result
    except urllib.error.HTTPError as error:
        raise QueryFailed(error.read().decode(errors="replace")) from error
    except (OSError, ValueError, KeyError) as error:
        raise QueryFailed(f"{prometheus}: {error}") from error


def filled(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), legend).strip()


def newest(series: Series) -> float:
    return next((value for value in reversed(series.values) if not math.isnan(value)), math.nan)


def table(answers: list[Answer]) -> Iterator[str]:
    for answer in answers:
        shown = answer.error or ", ".join(f"{one.legend} {newest(one):.4g}" for one in answer.series[:4]) or "-"
        state = "ERROR" if answer.error else f"{len(answer.series)} series" if answer.series else "no data"
        yield f"{answer.panel.row:<10} {answer.panel.title:<26} {state:<10} {shown}"


def exit_code(answers: list[Answer], all_must_show: bool) -> int:
    if any(answer.error for answer in answers):
        return 1
    empty = [answer.panel for answer in answers if not answer.series]
    optional = GPU_PANELS | SLOW_TOKENIZER_PANELS
    missing = [panel for panel in empty if panel.row not in GPU_ROWS and panel.title not in optional]
    return 1 if all_must_show and missing else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--minutes", type=float, default=15.0, help="up to now (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="fail when a panel shows nothing that could")
    args = parser.parse_args()
    end_s = time.time()
    answers = [ask(args.prometheus, panel, end_s - 60 * args.minutes, end_s) for panel in read_panels()]
    print("\n".join(table(answers)))
    return exit_code(answers, args.all)


if __name__ == "__main__":
    sys.exit(main())
