"""The result of a run: summary, table, per-second series and the files on disk. Formats figures, computes none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import RunConfig
from .metrics import COLUMNS, latencies
from .page import page
from .pictures import run_document
from .series import per_second
from .stamps import ProcessRecord, RequestRecord


@dataclass(frozen=True, slots=True)
class Report:
    """`summary` is what the JSON line holds; `records` are the raw stamps it was computed from."""

    config: RunConfig
    summary: dict[str, Any]
    records: Sequence[RequestRecord]
    processes: Sequence[ProcessRecord]

    @property
    def valid(self) -> bool:
        """False when the load was not the load asked for; `reasons` says why."""
        return bool(self.summary["valid"])

    @property
    def reasons(self) -> list[str]:
        return list(self.summary["reasons"])

    @property
    def series(self) -> list[dict[str, float]]:
        """One row for each second of the run."""
        return per_second(self.records, min(p.start_ns for p in self.processes))

    def table(self) -> str:
        """What a person reads in a terminal."""
        s = self.summary
        asked = "-" if s["target_rps"] is None else f"{s['target_rps']:g}"
        lines = [
            f"requests {s['requests']}   failed {s['failed']}{_failure_words(s['failures'])}   "
            f"rate {s['achieved_rps']:g}/s (asked {asked})   missed schedule {s['missed_schedule_rate']:.2%}",
            f"output {s['output_tokens_per_s']:g} tokens/s   total {s['total_tokens_per_s']:g} tokens/s   "
            f"goodput {s['goodput_rps']:g} requests/s",
        ]
        if s["completed"]:
            lines += ["", f"{'milliseconds':<24}{'samples':>10}" + "".join(f"{c:>10}" for c in COLUMNS)]
        for title, figures in latencies(s):
            cells = "".join(f"{figures[c]:>10.2f}" for c in COLUMNS)
            lines.append(f"{title:<24}{figures['samples']:>10.0f}{cells}")
        for name, result in s["slo"].items():
            value = "none" if result["value_ms"] is None else f"{result['value_ms']:.1f} ms"
            verdict = "met" if result["met"] else "MISSED"
            lines.append(f"SLO {name} p{result['percentile']:g} <= {result['limit_ms']:g} ms: {value}, {verdict}")
        for word, error in {r.outcome: r.error for r in self.records if r.error}.items():
            lines.append(f"{word}, for example: {error[:160]}")
        lines += [f"INVALID RUN: {reason}" for reason in s["reasons"]]
        return "\n".join(lines)

    def json_line(self) -> str:
        return json.dumps(self.summary)

    def write(self, directory: Path) -> list[Path]:
        """summary.json, series.csv and report.html; returns the paths."""
        directory.mkdir(parents=True, exist_ok=True)
        summary = directory / "summary.json"
        summary.write_text(json.dumps(self.summary, indent=1), encoding="utf-8")
        series = directory / "series.csv"
        rows = self.series
        header = ",".join(rows[0]) if rows else ""
        series.write_text("\n".join([header, *(",".join(f"{v:g}" for v in r.values()) for r in rows)]) + "\n")
        shown = directory / "report.html"
        shown.write_text(page(run_document(self)), encoding="utf-8")
        return [summary, series, shown]


def _failure_words(failures: dict[str, int]) -> str:
    return f" ({', '.join(f'{word} {n}' for word, n in failures.items())})" if failures else ""
