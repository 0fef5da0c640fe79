"""What pinning does to a server on this machine: the same closed-loop load against several placements, in turns.

Placements are words of `--cpus` and `--placement`: "off", "auto", "engine=1 scheduler=0 tokenizer=0 server=0". Every
round starts a fresh server for each of them. Prints a table of medians and, as the last line, one JSON document.

    python loadtest/benchmarks/placement.py --model DIR --streams 4 --rounds 3 --placement off --placement auto
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from closed_loop import closed_loop
from tritandem.config import Config, placement_from_words
from tritandem.machine.cpu_list import format_cpus
from tritandem.placement import COMPONENTS, plan_here
from tritandem.server import TritonServer
from tritandem_loadtest import run

FIGURES = ("output_tokens_per_s", "ttft_ms_p50", "ttft_ms_p99", "itl_ms_p50", "itl_ms_p99", "e2e_ms_p50")


def measure(placement: str, args: argparse.Namespace) -> dict[str, float]:
    """One server, one load."""
    ports = {"http_port": args.first_port, "grpc_port": args.first_port + 1, "metrics_port": args.first_port + 2}
    with TritonServer(args.model, placement=placement, engine_config=args.engine_config, **ports) as server:
        summary = run(closed_loop(server.grpc_url, "scheduler", args.streams, args)).summary
    if summary["failed"]:
        raise SystemExit(f"{placement}: {summary['failed']} requests failed")
    return {name: float(summary[name]) for name in FIGURES}


def where(placement: str) -> dict[str, str]:
    plan = plan_here(Config(placement=placement_from_words(placement)))
    return {name: format_cpus(plan.cpus_of(name)) for name in COMPONENTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--engine-config", type=Path)
    parser.add_argument("--placement", action="append", metavar="WORDS", help="repeat it; default: off and auto")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--processes", type=int, default=1, help="of the load generator")
    parser.add_argument("--words", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first-port", type=int, default=8000, help="the first of three ports")
    args = parser.parse_args()
    placements = args.placement or ["off", "auto"]
    runs: dict[str, list[dict[str, float]]] = {placement: [] for placement in placements}
    for number in range(args.rounds):
        for placement in placements[::-1] if number % 2 else placements:
            runs[placement].append(measure(placement, args))
            print(f"round {number + 1}, {placement}: {runs[placement][-1]}", file=sys.stderr)
    medians = {
        placement: {name: statistics.median(one[name] for one in found) for name in FIGURES}
        for placement, found in runs.items()
    }
    report: list[dict[str, Any]] = []
    print(f"{'placement':<48}" + "".join(f"{name:>21}" for name in FIGURES))
    for placement, figures in medians.items():
        print(f"{placement:<48}" + "".join(f"{figures[name]:>21.1f}" for name in FIGURES))
        report.append({"placement": placement, "cpus": where(placement), **figures})
    print(json.dumps({"streams": args.streams, "rounds": args.rounds, "placements": report}))


if __name__ == "__main__":
    main()
