"""Draws the dashboard as it stands in a Prometheus: `draw_dashboard.py --prometheus URL --output FILE.png`

The panels, their places, queries and units are the dashboard's own; the pixels are matplotlib's, not Grafana's. For
reports and for looking without a Grafana. Needs the extra `loadtest`.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import check_panels
import matplotlib

matplotlib.use("Agg")
from matplotlib import dates, pyplot, ticker

CELL_WIDTH_IN, CELL_HEIGHT_IN = 0.58, 0.27
ROW_CELLS = 1
# Cells of a panel beside its axes: for the numbers on the left, title above, times and legend below.
LEFT, RIGHT, ABOVE, BELOW = 1.15, 0.25, 1.1, 2.1
MOST_LEGENDS = 8
UNITS = {"s": "s", "reqps": "req/s", "ops": "1/s", "Bps": "B/s", "bytes": "B", "watt": "W", "percentunit": "%"}
PREFIXED = frozenset({"s", "Bps", "bytes", "watt"})


def draw(answers: list[check_panels.Answer], span_s: tuple[float, float], output: Path, title: str) -> None:
    """All panels show the same span of Unix time. Rows whose panels are all empty are left out."""
    rows: dict[str, list[check_panels.Answer]] = {}
    for answer in answers:
        rows.setdefault(answer.panel.row, []).append(answer)
    rows = {name: members for name, members in rows.items() if any(member.series for member in members)}
    heights = {name: 1 + max(bottom(a) for a in members) - top(members) for name, members in rows.items()}
    cells = sum(heights.values()) + 1
    figure = pyplot.figure(figsize=(24 * CELL_WIDTH_IN, cells * CELL_HEIGHT_IN), dpi=80)
    figure.text(0.01, 1 - 0.6 / cells, title, fontsize=13, weight="bold", va="center")
    used = 1
    for name, members in rows.items():
        figure.text(0.01, 1 - (used + 0.5) / cells, name, fontsize=12, weight="bold", va="center", color="#345")
        for member in members:
            place = member.panel.place
            y = used + ROW_CELLS + place["y"] - top(members)
            bottom_left = place["x"] + LEFT, cells - y - place["h"] + BELOW
            box = (*bottom_left, place["w"] - LEFT - RIGHT, place["h"] - ABOVE - BELOW)
            axes = figure.add_axes((box[0] / 24, box[1] / cells, box[2] / 24, box[3] / cells))
            draw_panel(axes, member, span_s)
        used += heights[name]
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)
    pyplot.close(figure)


def draw_panel(axes: Any, answer: check_panels.Answer, span_s: tuple[float, float]) -> None:
    panel = answer.panel
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    axes.set_xlim(*[utc(at) for at in span_s])
    axes.xaxis.set_major_locator(dates.AutoDateLocator(minticks=2, maxticks=5))
    axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M:%S"))
    axes.yaxis.set_major_formatter(unit_formatter(panel.unit))
    if not answer.series:
        axes.text(0.5, 0.5, "no data", transform=axes.transAxes, ha="center", va="center", color="#999")
        axes.set_yticks([])
        return
    base: dict[float, float] = {}
    for series in answer.series:
        times = [utc(at) for at in series.times_s]
        values = series.values
        if panel.stacked:
            values = [base.get(at, 0.0) + value for at, value in zip(series.times_s, values, strict=True)]
            base.update(zip(series.times_s, values, strict=True))
        # A series of which a scrape or two exists must show as well.
        axes.plot(times, values, linewidth=1.2, marker="." if len(times) < 5 else "", label=series.legend)
    axes.margins(y=0.08)  # a line at 100 % is not the frame
    axes.set_ylim(bottom=0)
    if len(answer.series) <= MOST_LEGENDS:
        axes.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncol=4, frameon=False)


def unit_formatter(unit: str) -> Any:
    if unit == "percentunit":
        return ticker.PercentFormatter(xmax=1.0, decimals=None)
    if unit in PREFIXED:
        return ticker.EngFormatter(unit=UNITS[unit])
    return ticker.FuncFormatter(lambda value, _: f"{value:g} {UNITS.get(unit, '')}".strip())


def utc(unix_s: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(unix_s, datetime.timezone.utc)


def top(members: list[check_panels.Answer]) -> int:
    return min(member.panel.place["y"] for member in members)


def bottom(answer: check_panels.Answer) -> int:
    return answer.panel.place["y"] + answer.panel.place["h"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    check_panels.add_source(parser)
    parser.add_argument("--output", type=Path, required=True, metavar="PNG")
    parser.add_argument("--title", default="Tritandem")
    args = parser.parse_args()
    span_s = check_panels.span(args)
    answers = check_panels.ask_all(args.prometheus, span_s)
    print("\n".join(check_panels.table(answers)))
    draw(answers, span_s, args.output, args.title)
    return check_panels.exit_code(answers, False)


if __name__ == "__main__":
    sys.exit(main())
