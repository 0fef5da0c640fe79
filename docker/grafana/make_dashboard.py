"""Writes dashboards/tritandem.json from panels.yaml: `python docker/grafana/make_dashboard.py`.

A test compares the two files, and every metric in them with the code.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
OUTPUT, PANELS = FOLDER / "dashboards" / "tritandem.json", FOLDER / "panels.yaml"
WIDTH, PANEL_WIDTH, PANEL_HEIGHT = 24, 8, 8
PLACEHOLDERS = {"RATE": "$__rate_interval", "SEL": 'instance=~"$instance"'}
SHORT = re.compile(r"(?P<function>\w+) (?P<metric>\w+)(?: or (?P<other>\w+))?(?: by (?P<label>\w+))?")


def promql(query: str) -> str:
    """A query of panels.yaml as Prometheus takes it, with Grafana's variables. Raises ValueError."""
    if short := SHORT.fullmatch(query):
        function, label = short["function"], short["label"]
        alternatives = [_term(function, metric, label) for metric in (short["metric"], short["other"]) if metric]
        query = " or ".join(alternatives)
    elif "(" not in query:
        raise ValueError(f"given {query!r}, allowed: FUNCTION METRIC [or METRIC] [by LABEL], or PromQL")
    for name, variable in PLACEHOLDERS.items():
        query = re.sub(rf"\b{name}\b", lambda _, variable=variable: variable, query)
    return query


def _term(function: str, metric: str, label: str | None) -> str:
    by = f" by ({label}) " if label else ""
    if function == "per_second":
        return f"sum{by}(rate({metric}{{SEL}}[RATE]))"
    if function in ("p50", "p99"):
        labels = f"le, {label}" if label else "le"
        return f"histogram_quantile(0.{function[1:]}, sum by ({labels}) (rate({metric}_bucket{{SEL}}[RATE])))"
    return f"{function}{by}({metric}{{SEL}})"


def queries(panel: dict[str, Any]) -> dict[str, str]:
    """Legend -> PromQL, quantiles first."""
    found = {}
    if metric := panel.get("quantiles"):
        label = metric.partition(" by ")[2]
        found = {f"{p} {{{{{label}}}}}" if label else p: promql(f"{p} {metric}") for p in ("p50", "p99")}
    return found | {legend: promql(query) for legend, query in panel.get("queries", {}).items()}


def dashboard() -> dict[str, Any]:
    """Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in yaml.safe_load(PANELS.read_text()).items():
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
            }
        )
        y += 1
        per_line = WIDTH // PANEL_WIDTH
        for place, panel in enumerate(row):
            x = place % per_line * PANEL_WIDTH
            panels.append(_panel(panel, len(panels) + 1, x, y + place // per_line * PANEL_HEIGHT))
        y += -(-len(row) // per_line) * PANEL_HEIGHT
    return {
        "uid": "tritandem",
        "title": "Tritandem",
        "description": "Does the CPU starve the GPU? Made by docker/grafana/make_dashboard.py.",
        "tags": ["tritandem", "triton"],
        "schemaVersion": 39,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "instance",
                    "label": "Server",
                    "type": "query",
                    "datasource": {"type": "prometheus", "uid": "prometheus"},
                    "query": {"query": "label_values(up, instance)", "refId": "instance"},
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "allValue": ".*",
                    "current": {"text": "All", "value": "$__all"},
                }
            ]
        },
        "panels": panels,
    }


def _panel(panel: dict[str, Any], number: int, x: int, y: int) -> dict[str, Any]:
    stacking = {"mode": "normal" if panel.get("stacked") else "none", "group": "A"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel["title"],
        "description": panel["tells"],
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": {"x": x, "y": y, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {
            "defaults": {
                "unit": panel["unit"],
                "min": 0,
                "custom": {"fillOpacity": 10, "lineWidth": 1, "showPoints": "never", "stacking": stacking},
            },
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + place), "legendFormat": legend, "expr": query}
            for place, (legend, query) in enumerate(queries(panel).items())
        ],
    }


def rendered() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    OUTPUT.write_text(rendered())
