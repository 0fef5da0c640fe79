"""What this project adds to Locust's web page and report: a tab with the token-level table, charts in the charts tab
and in the report, and a CSV file.

Runs in the process that has the page (local or master). Knows nothing about how figures come about.
"""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

from ..page import following, script, section
from .live import SHOWN, LiveFigures

_KEY = "token-latency"
_EMBED = script("below_locusts_charts.js")


def extend(web_ui: Any, live: LiveFigures) -> None:
    """Add the tab, its data, the charts and the download to a Locust WebUI."""
    columns = [("metric", "Metric"), ("samples", "# Samples")]
    columns += [(f"p{p}", f"{p}%ile") for p in SHOWN] + [("max", "Max")]
    structure = [{"key": key, "title": title} for key, title in columns]
    web_ui.template_args["extended_tabs"] = [{"title": "Token latency", "key": _KEY}]
    web_ui.template_args["extended_tables"] = [{"key": _KEY, "structure": structure}]
    web_ui.template_args["extended_csv_files"] = [{"href": "./tokens/csv", "title": "Download token latency CSV"}]

    def tokens() -> str:
        return following("Token charts", "tokens/data")

    def tokens_data() -> dict[str, Any]:
        return live.figures()

    def tokens_csv() -> tuple[str, dict[str, str]]:
        return as_csv(live), {"Content-Type": "text/csv", "Content-Disposition": "attachment;filename=tokens.csv"}

    def add_figures(response: Any) -> Any:
        from flask import request

        if request.path.endswith("/stats/requests") and response.is_json:
            body = json.loads(response.get_data())
            body["extended_stats"] = [{"key": _KEY, "data": live.table()}]
            response.set_data(json.dumps(body))
        elif request.path.endswith("/stats/report"):
            response.set_data(with_section(response.get_data(as_text=True), live))
        elif request.path == "/" and response.mimetype == "text/html":
            response.set_data(response.get_data(as_text=True).replace("</body>", f"{_EMBED}</body>"))
        return response

    for path, view in (("/tokens", tokens), ("/tokens/data", tokens_data), ("/tokens/csv", tokens_csv)):
        web_ui.app.add_url_rule(path, path, web_ui.auth_required_if_enabled(view))
    web_ui.app.after_request(add_figures)


def complete_report(path: Path, live: LiveFigures) -> None:
    """Add the charts to the file that `--html` wrote."""
    path.write_text(with_section(path.read_text(encoding="utf-8"), live), encoding="utf-8")


def with_section(page: str, live: LiveFigures) -> str:
    """Locust's report with the token charts at its end; as it was when nothing has been measured."""
    head, body_end, tail = page.rpartition("</body>")
    return f"{head}{section(live.figures())}{body_end}{tail}" if body_end and live.rows else page


def as_csv(live: LiveFigures) -> str:
    """The charts' rows, one a second; an empty cell is a second without a sample."""
    text = io.StringIO()
    if live.rows:
        writer = csv.DictWriter(text, ["second", *live.rows[0]])
        writer.writeheader()
        writer.writerows({"second": second, **row} for second, row in enumerate(live.rows))
    return text.getvalue()
