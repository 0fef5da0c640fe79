"""What this project adds to Locust's web page: a tab with the token-level table and a page of charts at /tokens.

Runs in the process that has the page (local or master). Knows nothing about how figures come about.
"""

from __future__ import annotations

import json
from typing import Any

from .charts_page import PAGE
from .live import SHOWN, LiveFigures

_KEY = "token-latency"
_LINK = (
    '<a href="tokens" target="_blank" style="position:fixed;right:18px;bottom:64px;z-index:9999;padding:8px 14px;'
    'border-radius:20px;background:#2f6db3;color:#fff;font:14px system-ui;text-decoration:none">Token charts</a>'
)


def extend(web_ui: Any, live: LiveFigures) -> None:
    """Add the tab, its data and the charts to a Locust WebUI."""
    columns = [("metric", "Metric"), ("samples", "# Samples")]
    columns += [(f"p{p}", f"{p}%ile") for p in SHOWN] + [("max", "Max")]
    web_ui.template_args["extended_tabs"] = [{"title": "Token latency", "key": _KEY}]
    structure = [{"key": key, "title": title} for key, title in columns]
    web_ui.template_args["extended_tables"] = [{"key": _KEY, "structure": structure}]

    def tokens() -> str:
        return PAGE

    def tokens_data() -> dict[str, Any]:
        return {"rows": live.rows, "table": live.table(), "outcomes": dict(live.outcomes), "tokens": live.output_tokens}

    def add_figures(response: Any) -> Any:
        from flask import request

        if request.path.endswith("/stats/requests") and response.is_json:
            body = json.loads(response.get_data())
            body["extended_stats"] = [{"key": _KEY, "data": live.table()}]
            response.set_data(json.dumps(body))
        elif request.path == "/" and response.mimetype == "text/html":
            response.set_data(response.get_data(as_text=True).replace("</body>", f"{_LINK}</body>"))
        return response

    for path, view in (("/tokens", tokens), ("/tokens/data", tokens_data)):
        web_ui.app.add_url_rule(path, path, web_ui.auth_required_if_enabled(view))
    web_ui.app.after_request(add_figures)
