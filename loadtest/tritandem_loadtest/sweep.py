"""Tries rising request rates and finds the highest that keeps the SLO. Each rate is a whole run of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .config import LoadTestError, RunConfig
from .report import Report
from .runner import Progress, run

_FIGURES = ("achieved_rps", "goodput_rps", "output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p99", "failed")


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
        head = f"{'asked/s':>8}" + "".join(f"{name:>21}" for name in _FIGURES) + "   SLO"
        lines = [head]
        for row in self.rows():
            cells = "".join(f"{'-' if row[n] is None else format(row[n], '.6g'):>21}" for n in _FIGURES)
            verdict = "kept" if row["slo_met"] else "missed" if row["valid"] else "INVALID"
            lines.append(f"{row['rps']:>8g}{cells}   {verdict}")
        best = self.best_rps
        lines.append(
            "no rate keeps the SLO" if best is None else f"highest rate that keeps the SLO: {best:g} requests/s"
        )
        return "\n".join(lines)

    def json_line(self) -> str:
        return json.dumps({"best_rps": self.best_rps, "rates": self.rows()})

    def write(self, directory: Path) -> list[Path]:
        """sweep.json and the curve; returns the paths."""
        from . import plots

        directory.mkdir(parents=True, exist_ok=True)
        summary = directory / "sweep.json"
        summary.write_text(self.json_line(), encoding="utf-8")
        return [summary, plots.draw_sweep(self.rows(), directory)]


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
