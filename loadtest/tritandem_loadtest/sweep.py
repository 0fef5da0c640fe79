"""Tries rising request rates and finds the highest that keeps the SLO. Each rate is a whole run of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .config import LoadTestError, RunConfig
from .page import page
from .pictures import sweep_document
from .report import Report
from .runner import Progress, run

_FIGURES = (
    "achieved_rps",
    "goodput_rps",
    "output_tokens_per_s",
    "ttft_ms_p50",
    "ttft_ms_p99",
    "itl_ms_p99",
    "pause_ms_p99",
    "failed",
)


@dataclass(frozen=True, slots=True)
class SweepResult:
    """One report a rate, in rising order; the sweep ends early once a rate has missed the SLO."""

    reports: Sequence[Report]

    @property
    def best_rps(self) -> float | None:
        """The highest rate up to which every run was valid, kept the SLO and failed nothing."""
        best = None
        for report in self.reports:
            if not keeps_slo(report):
                break
            best = report.config.rps
        return best

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "rps": report.config.rps,
                "slo_met": keeps_slo(report),
                "valid": report.valid,
                **{name: report.summary.get(name) for name in _FIGURES},
            }
            for report in self.reports
        ]

    def table(self) -> str:
        """What a person reads in a terminal."""
        lines = [
            f"{row[0]:>8}" + "".join(f"{cell:>21}" for cell in row[1:-1]) + f"   {row[-1]}" for row in self._cells()
        ]
        best = self.best_rps
        last = "no rate keeps the SLO" if best is None else f"highest rate that keeps the SLO: {best:g} requests/s"
        return "\n".join([*lines, last])

    def _cells(self) -> list[list[str]]:
        """The table's head and a row for each rate."""
        cells = [["asked/s", *_FIGURES, "SLO"]]
        for row in self.rows():
            verdict = "kept" if row["slo_met"] else "missed" if row["valid"] else "INVALID"
            figures = ["-" if row[name] is None else f"{row[name]:.6g}" for name in _FIGURES]
            cells.append([f"{row['rps']:g}", *figures, verdict])
        return cells

    def json_line(self) -> str:
        return json.dumps({"best_rps": self.best_rps, "rates": self.rows()})

    def write(self, directory: Path) -> list[Path]:
        """sweep.json and sweep.html, the curves; returns the paths."""
        directory.mkdir(parents=True, exist_ok=True)
        summary = directory / "sweep.json"
        summary.write_text(self.json_line(), encoding="utf-8")
        shown = directory / "sweep.html"
        shown.write_text(page(sweep_document(self.rows(), self._cells())), encoding="utf-8")
        return [summary, shown]


def keeps_slo(report: Report) -> bool:
    return report.valid and bool(report.summary["slo_met"]) and report.summary["failed"] == 0


def sweep(base: RunConfig, rates_rps: Sequence[float], progress: Progress | None = None) -> SweepResult:
    """Run every rate until one misses the SLO. Raises LoadTestError without an SLO or for rates that do not rise."""
    if not base.slo:
        raise LoadTestError("a sweep needs --slo to know which rate is too high")
    if list(rates_rps) != sorted(set(rates_rps)):
        raise LoadTestError(f"rates must rise: {', '.join(f'{r:g}' for r in rates_rps)}")
    reports: list[Report] = []
    for rps in rates_rps:
        out_dir = str(Path(base.out_dir) / f"rps-{rps:g}") if base.out_dir else ""
        reports.append(run(replace(base, rps=rps, out_dir=out_dir), progress))
        if not keeps_slo(reports[-1]):
            break
    return SweepResult(reports)
