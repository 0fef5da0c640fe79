"""Pictures of runs as PNG files. Imports matplotlib when called, never at import; computes no figure itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .metrics import METRICS, samples_ms
from .stamps import COMPLETED

if TYPE_CHECKING:
    from .report import Report

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#2f6db3", "#d9822b", "#3a8f5c", "#c0392b", "#7a7f87"


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "figure.dpi": 110,
            "axes.grid": True,
            "grid.alpha": 0.25,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "font.size": 9.5,
        }
    )
    return pyplot


def draw_run(report: Report, directory: Path) -> dict[str, Path]:
    """Title -> picture: latency over time, cumulative distributions, rate and tokens over time."""
    pictures = {
        "Latency over time": directory / "latency.png",
        "Distribution": directory / "distribution.png",
        "Rate and throughput": directory / "throughput.png",
    }
    _latency_over_time(report, pictures["Latency over time"])
    _distributions(report, pictures["Distribution"])
    _throughput(report, pictures["Rate and throughput"])
    return pictures


def _latency_over_time(report: Report, path: Path) -> None:
    pyplot = _pyplot()
    rows = report.series
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8.5, 5.2), sharex=True)
    at_s = [row["second"] + 0.5 for row in rows]
    for axes, name in ((top, "ttft"), (bottom, "itl")):
        axes.plot(at_s, [row[f"{name}_ms_p50"] for row in rows], color=_BLUE, marker="o", markersize=3, label="p50")
        axes.plot(at_s, [row[f"{name}_ms_p99"] for row in rows], color=_ORANGE, marker="o", markersize=3, label="p99")
        if name in report.config.slo:
            axes.axhline(report.config.slo[name], color=_RED, linestyle="--", linewidth=1, label="SLO")
        axes.set_ylabel(f"{METRICS[name]}, ms")
        axes.set_ylim(bottom=0)
        _legend_above(axes)
    bottom.set_xlabel("seconds since the start (when the request was due)")
    _save(figure, path)


def _distributions(report: Report, path: Path) -> None:
    pyplot = _pyplot()
    samples = samples_ms([r for r in report.records if r.outcome == COMPLETED])
    figure, panels = pyplot.subplots(1, 3, figsize=(8.5, 3.2), sharey=True)
    for axes, name in zip(panels, ("ttft", "itl", "e2e"), strict=True):
        values = sorted(samples[name])
        if values:
            shares = [(i + 1) / len(values) for i in range(len(values))]
            axes.step(values, shares, where="post", color=_BLUE)
        for share in (0.5, 0.99):
            axes.axhline(share, color=_GREY, linewidth=0.8, linestyle=":")
        if name in report.config.slo:
            axes.axvline(report.config.slo[name], color=_RED, linestyle="--", linewidth=1)
        axes.set_xlabel(f"{METRICS[name]}, ms")
    panels[0].set_ylabel("share of samples at or below")
    _save(figure, path)


def _throughput(report: Report, path: Path) -> None:
    pyplot = _pyplot()
    rows = report.series
    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8.5, 5.2), sharex=True)
    at_s = [row["second"] + 0.5 for row in rows]
    top.step(at_s, [row["due"] for row in rows], where="mid", color=_GREY, linewidth=3, alpha=0.5, label="due")
    top.step(at_s, [row["sent"] for row in rows], where="mid", color=_BLUE, label="sent")
    top.step(at_s, [row["completed"] for row in rows], where="mid", color=_GREEN, label="completed")
    if any(row["failed"] for row in rows):
        top.step(at_s, [row["failed"] for row in rows], where="mid", color=_RED, label="failed")
    top.set_ylabel("requests/s")
    bottom.plot(at_s, [row["output_tokens"] for row in rows], color=_BLUE, label="output tokens/s")
    bottom.set_ylabel("output tokens/s")
    flight = bottom.twinx()
    flight.plot(at_s, [row["in_flight"] for row in rows], color=_ORANGE, linewidth=1, label="in flight")
    flight.set_ylabel("requests in flight")
    flight.grid(False)
    flight.set_ylim(bottom=0)
    flight.yaxis.get_major_locator().set_params(integer=True)
    for axes in (top, bottom):
        axes.set_ylim(bottom=0)
    _legend_above(top)
    _legend_above(bottom, bottom.get_lines() + flight.get_lines())
    bottom.set_xlabel("seconds since the start")
    _save(figure, path)


def draw_sweep(rows: Sequence[dict[str, Any]], directory: Path) -> Path:
    """Throughput and latency against the rate asked for; rates that missed the SLO are drawn hollow."""
    pyplot = _pyplot()
    from matplotlib import ticker

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 3.8))
    rates = [row["rps"] for row in rows]
    left.plot(rates, rates, color=_GREY, linestyle=":", label="asked")
    for axes, name, label, colour in (
        (left, "achieved_rps", "sent", _BLUE),
        (left, "goodput_rps", "within the SLO", _GREEN),
        (right, "ttft_ms_p50", "first token p50", _BLUE),
        (right, "ttft_ms_p99", "first token p99", _ORANGE),
        (right, "itl_ms_p99", "inter-token p99", _GREEN),
    ):
        points = [(row["rps"], row[name], row["slo_met"]) for row in rows if row[name] is not None]
        axes.plot([p[0] for p in points], [p[1] for p in points], color=colour, label=label)
        for rps, value, met in points:
            axes.plot([rps], [value], marker="o", color=colour, markerfacecolor=colour if met else "white")
    left.set_ylabel("requests/s")
    right.set_ylabel("milliseconds")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(rates, [f"{rps:g}" for rps in rates])
        axes.set_xlabel("requests/s asked (hollow: SLO missed or invalid run)")
        _legend_above(axes)
    left.set_yticks(rates, [f"{rps:g}" for rps in rates])
    right.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_major_formatter("{x:,g}")
    for axes in (left, right):
        axes.minorticks_off()
    path = directory / "sweep.png"
    _save(figure, path)
    return path


def _legend_above(axes: Any, handles: Sequence[Any] | None = None) -> None:
    """In one line over the right end of the panel, where it covers no data."""
    place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.98), "ncols": 4}
    if handles is None:
        axes.legend(**place)
    else:
        axes.legend(handles, [handle.get_label() for handle in handles], **place)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path)
    _pyplot().close(figure)
