"""Asks a Prometheus for every panel of the dashboard: `check_panels.py --prometheus URL [--minutes 15]`

Prints which panels have data, how many series, and their newest values. Exit code 1 when a query fails, and, with
`--all`, when a panel shows nothing that needs no GPU, no slow tokenizer and no OpenAI API. Standard library only.
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
from pathlib import Path
from typing import Any

DASHBOARD = Path(__file__).resolve().parent / "dashboards" / "tritandem.json"
POINTS = 120  # of each series
RATE_WINDOW_S = 60
# What Grafana puts in when every server is selected.
SELECTED = ".*"
SHOWN = 4  # series of a panel
# What stays empty without a GPU: rows, and panels of other rows. And as long as the fast tokenizer, which needs no
# cache, is in use, or the OpenAI API is not.
GPU_ROWS = {"GPU"}
OPTIONAL_PANELS = {
    "Step launch latency", "Launch skew", "Staging", "Tokenizer's prefix cache", "OpenAI API by outcome",
}  # fmt: skip


class QueryFailed(Exception):
    """Prometheus's words about a query, or about why it cannot be asked."""


def newest_values(prometheus: str, panel: dict[str, Any], start_s: float, end_s: float) -> list[str]:
    """`LEGEND VALUE` of every series of a panel that has a value within a span of time. Raises QueryFailed."""
    found = []
    for target in panel["targets"]:
        for series in query_range(prometheus, target["expr"], start_s, end_s):
            numbers = [value for _, text in series["values"] if not math.isnan(value := float(text))]
            if numbers:
                found.append(f"{filled(target['legendFormat'], series['metric'])} {numbers[-1]:.4g}")
    return found


def query_range(prometheus: str, query: str, start_s: float, end_s: float) -> list[dict[str, Any]]:
    """Raises QueryFailed."""
    concrete = query.replace("$__rate_interval", f"{RATE_WINDOW_S}s").replace("$instance", SELECTED)
    fields = {"query": concrete, "start": start_s, "end": end_s, "step": max(1.0, (end_s - start_s) / POINTS)}
    url = f"{prometheus.rstrip('/')}/api/v1/query_range?{urllib.parse.urlencode(fields)}"
    try:
        with urllib.request.urlopen(url, timeout=30) as response:
            return json.load(response)["data"]["result"]
    except urllib.error.HTTPError as error:
        raise QueryFailed(error.read().decode(errors="replace")) from error
    except (OSError, ValueError, KeyError) as error:
        raise QueryFailed(f"{prometheus}: {error}") from error


def filled(legend: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), legend).strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", metavar="URL")
    parser.add_argument("--minutes", type=float, default=15.0, help="up to now (default: %(default)s)")
    parser.add_argument("--all", action="store_true", help="fail when a panel shows nothing that could")
    args = parser.parse_args()
    end_s, failed, row = time.time(), False, ""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        title = panel["title"]
        if panel["type"] == "row":
            row = title
            continue
        try:
            values = newest_values(args.prometheus, panel, end_s - 60 * args.minutes, end_s)
        except QueryFailed as error:
            state, shown, failed = "ERROR", str(error), True
        else:
            state, shown = (f"{len(values)} series", ", ".join(values[:SHOWN])) if values else ("no data", "-")
            failed |= args.all and not values and row not in GPU_ROWS and title not in OPTIONAL_PANELS
        print(f"{row:<10} {title:<26} {state:<10} {shown}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
