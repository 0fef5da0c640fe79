"""What a report shows on its page: a run or a sweep as a `page.Document`. Pure; computes no figure of its own but the
points of a distribution."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from .metrics import COLUMNS, METRICS, latencies, percentile, samples_ms
from .page import BLUE, GREEN, GREY, ORANGE, RED, Document, line_chart
from .stamps import COMPLETED

if TYPE_CHECKING:
    from .report import Report

_SHARES = [i / 2 for i in range(1, 201)]  # per cent, of a distribution's points


def run_document(report: Report) -> Document:
    s = report.summary
    facts = f"{s['arrival']} arrivals, workload {s['workload']}, {s['protocol']}, {s['dialect']}, {s['duration_s']:g} s"
    return {
        "title": f"Load test of {s['url']}",
        "facts": facts,
        "notes": _verdicts(report),
        "tiles": _tiles(s),
        "tables": [_latency_table(s), *_failures(report)],
        "charts": [*_over_time(report), *_distributions(report)],
        "texts": [["Configuration", json.dumps(asdict(report.config), indent=1)]],
    }


def sweep_document(rows: Sequence[dict[str, Any]], cells: Sequence[list[str]]) -> Document:
    """Figures against the rate asked for; hollow where the SLO was missed. `cells`: the table, its head first."""
    hollow = [not row["slo_met"] for row in rows]
    chart = partial(line_chart, [row["rps"] for row in rows], "requests/s asked", rows, hollow=hollow)
    return {
        "title": "Sweep over request rates",
        "facts": "hollow: the SLO was missed, a request failed or the run was invalid",
        "tables": [{"title": "Rates", "head": cells[0], "rows": cells[1:]}],
        "charts": [
            chart(
                "Requests per second",
                ("asked", GREY, "rps"),
                ("sent", BLUE, "achieved_rps"),
                ("within the SLO", GREEN, "goodput_rps"),
            ),
            chart("Time to first token, ms", ("p50", BLUE, "ttft_ms_p50"), ("p99", ORANGE, "ttft_ms_p99")),
            chart("Inter-token latency, ms", ("p99", GREEN, "itl_ms_p99")),
            chart("Output tokens per second", ("tokens", GREEN, "output_tokens_per_s")),
        ],
    }


def _verdicts(report: Report) -> list[list[str]]:
    notes = [["bad", f"Invalid run: {reason}"] for reason in report.reasons]
    for name, slo in report.summary["slo"].items():
        value = "no sample" if slo["value_ms"] is None else f"{slo['value_ms']:.1f} ms"
        verdict = "met" if slo["met"] else "missed"
        text = f"SLO {verdict}: {METRICS[name]} p{slo['percentile']:g} within {slo['limit_ms']:g} ms, measured {value}"
        notes.append(["good" if slo["met"] else "bad", text])
    return notes


def _tiles(s: dict[str, Any]) -> list[list[str]]:
    asked = "" if s["target_rps"] is None else f" of {s['target_rps']:g}"
    return [
        [f"{round(s['achieved_rps'], 1):g}{asked}", "requests/s sent"],
        [f"{s['requests']}", "requests"],
        [f"{s['failed']}", "failed"],
        [f"{s['output_tokens_per_s']:,.0f}", "output tokens/s"],
        [f"{s['total_tokens_per_s']:,.0f}", "total tokens/s"],
        [f"{round(s['goodput_rps'], 1):g}", "goodput, requests/s"],
        [f"{s['missed_schedule_rate']:.2%}", "missed schedule"],
    ]


def _latency_table(s: dict[str, Any]) -> Document:
    rows = [[title, f"{f['samples']:,.0f}", *(f"{f[c]:.2f}" for c in COLUMNS)] for title, f in latencies(s)]
    return {"title": "Latency, milliseconds", "head": ["", "samples", *COLUMNS], "rows": rows}


def _failures(report: Report) -> list[Document]:
    examples = {r.outcome: r.error for r in report.records if r.error}
    rows = [[word, str(n), examples.get(word, "")] for word, n in report.summary["failures"].items()]
    return [{"title": "Failures", "head": ["outcome", "requests", "example"], "rows": rows}] if rows else []


def _over_time(report: Report) -> list[Document]:
    rows = report.series
    chart = partial(line_chart, [row["second"] for row in rows], "s", rows)
    failed = [("failed", RED, "failed")] if any(row["failed"] for row in rows) else []
    return [
        *(
            chart(
                f"{METRICS[name].capitalize()} by when the request was due, ms",
                ("p50", BLUE, f"{name}_ms_p50"),
                ("p99", ORANGE, f"{name}_ms_p99"),
                limit=report.config.slo.get(name),
            )
            for name in ("ttft", "itl")
        ),
        chart(
            "Requests per second",
            ("due", GREY, "due"),
            ("sent", BLUE, "sent"),
            ("completed", GREEN, "completed"),
            *failed,
        ),
        chart("Output tokens per second", ("tokens", GREEN, "output_tokens")),
        chart("Requests in flight", ("in flight", ORANGE, "in_flight")),
    ]


def _distributions(report: Report) -> list[Document]:
    samples = samples_ms([r for r in report.records if r.outcome == COMPLETED])
    charts = []
    for name in ("ttft", "itl", "pause", "e2e"):
        if ordered := sorted(samples[name]):
            charts.append(
                {
                    "title": f"{METRICS[name].capitalize()}: per cent of samples at or below",
                    "xs": [round(percentile(ordered, share), 3) for share in _SHARES],
                    "unit": "ms",
                    "lines": [["per cent", BLUE, _SHARES]],
                    "limit_x": report.config.slo.get(name),
                }
            )
    return charts
