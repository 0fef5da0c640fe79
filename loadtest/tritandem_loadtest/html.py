"""A run as one self-contained HTML page: pictures are embedded, nothing is loaded from elsewhere."""

from __future__ import annotations

import base64
import html
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from .metrics import COLUMNS, METRICS, latencies

if TYPE_CHECKING:
    from .report import Report

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:1000px;padding:0 1rem;color:#1d2530;background:#fff}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin-top:2rem}.sub{color:#5b6470;margin-top:0}
table{border-collapse:collapse;width:100%}th,td{padding:.35rem .6rem;text-align:right;border-bottom:1px solid #e3e6ea}
th:first-child,td:first-child{text-align:left}td{font-variant-numeric:tabular-nums}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(118px,1fr));gap:.8rem;margin:1.2rem 0}
.tile{border:1px solid #e3e6ea;border-radius:8px;padding:.7rem .9rem}.tile b{display:block;font-size:1.35rem}
.tile span{color:#5b6470;font-size:.85rem}.bad{background:#fdecea;border-left:4px solid #c0392b;padding:.6rem 1rem}
.good{background:#eaf6ee;border-left:4px solid #3a8f5c;padding:.6rem 1rem}img{max-width:100%}
pre{background:#f5f6f8;padding:.8rem;overflow:auto;border-radius:6px;font-size:.8rem;white-space:pre-wrap}
"""


def render(report: Report, pictures: dict[str, Path]) -> str:
    """The page. `pictures`: title -> PNG file."""
    s = report.summary
    title = f"Load test of {s['url']}"
    subtitle = (
        f"{s['arrival']} arrivals, workload {s['workload']}, {s['protocol']}, {s['dialect']}, {s['duration_s']:g} s"
    )
    body = [
        f"<h1>{html.escape(title)}</h1><p class=sub>{html.escape(subtitle)}</p>",
        _verdict(report),
        _tiles(report),
        "<h2>Latency, milliseconds</h2>",
        _latency_table(report),
        *(f"<h2>{html.escape(name)}</h2>{_image(name, path)}" for name, path in pictures.items()),
        _failures(report),
        f"<h2>Configuration</h2><pre>{html.escape(json.dumps(asdict(report.config), indent=1))}</pre>",
    ]
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(body)}</body></html>"


def _verdict(report: Report) -> str:
    lines = [("bad", f"Invalid run: {reason}") for reason in report.reasons]
    for name, slo in report.summary["slo"].items():
        value = "no sample" if slo["value_ms"] is None else f"{slo['value_ms']:.1f} ms"
        verdict = "met" if slo["met"] else "missed"
        text = f"SLO {verdict}: {METRICS[name]} p{slo['percentile']:g} within {slo['limit_ms']:g} ms, measured {value}"
        lines.append(("good" if slo["met"] else "bad", text))
    return "".join(f"<p class={kind}>{html.escape(text)}</p>" for kind, text in lines)


def _tiles(report: Report) -> str:
    s = report.summary
    asked = "" if s["target_rps"] is None else f" of {s['target_rps']:g}"
    tiles = (
        (f"{round(s['achieved_rps'], 1):g}{asked}", "requests/s sent"),
        (f"{s['requests']}", "requests"),
        (f"{s['failed']}", "failed"),
        (f"{s['output_tokens_per_s']:,.0f}", "output tokens/s"),
        (f"{s['total_tokens_per_s']:,.0f}", "total tokens/s"),
        (f"{round(s['goodput_rps'], 1):g}", "goodput, requests/s"),
        (f"{s['missed_schedule_rate']:.2%}", "missed schedule"),
    )
    return (
        "<div class=tiles>" + "".join(f"<div class=tile><b>{v}</b><span>{k}</span></div>" for v, k in tiles) + "</div>"
    )


def _latency_table(report: Report) -> str:
    head = "".join(f"<th>{c}</th>" for c in ("", "samples", *COLUMNS))
    cells = (
        f"<td>{html.escape(title)}</td><td>{f['samples']:,.0f}</td>" + "".join(f"<td>{f[c]:.2f}</td>" for c in COLUMNS)
        for title, f in latencies(report.summary)
    )
    return f"<table><tr>{head}</tr>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


def _failures(report: Report) -> str:
    failures = report.summary["failures"]
    if not failures:
        return ""
    examples = {r.outcome: r.error for r in report.records if r.error}
    rows = "".join(
        f"<tr><td>{html.escape(word)}</td><td>{n}</td><td>{html.escape(examples.get(word, ''))}</td></tr>"
        for word, n in failures.items()
    )
    return f"<h2>Failures</h2><table><tr><th>outcome</th><th>requests</th><th>example</th></tr>{rows}</table>"


def _image(name: str, path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(name)}" src="data:image/png;base64,{data}">'
