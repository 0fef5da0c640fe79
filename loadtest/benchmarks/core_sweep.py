"""How much CPU does a server need? The same load against a server pinned to 1, 2, 4, 8 ... cores.

Starts each server on each number of cores, drives it from other cores, and plots throughput, time to first token, GPU
utilisation and CPU pressure against cores. Prints a table and, as the last line, one JSON document.

    python loadtest/benchmarks/core_sweep.py --cores 1,2,4,8 --rps 8 --words 2000 \\
        --server tritandem tritandem "tritandem serve --model DIR" \\
        --server vllm vllm "tritonserver --model-repository=vllm_repository"
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from pinned_server import Load, LoadSampler, PinnedServer, ServerFailed
from tritandem_loadtest import LoadTestError, RunConfig, run
from tritandem_loadtest.dialects import DIALECTS

_FIGURES = (
    ("output_tokens_per_s", "tokens/s", "{:.0f}"),
    ("achieved_rps", "sent/s", "{:.2f}"),
    ("ttft_ms_p50", "TTFT p50", "{:.1f}"),
    ("ttft_ms_p99", "TTFT p99", "{:.1f}"),
    ("itl_ms_p50", "ITL p50", "{:.2f}"),
    ("itl_ms_p99", "ITL p99", "{:.2f}"),
    ("e2e_ms_p50", "e2e p50", "{:.0f}"),
    ("failed", "failed", "{}"),
    ("gpu_percent", "GPU %", "{:.0f}"),
    ("cpu_cores_used", "cores used", "{:.2f}"),
    ("cpu_cores_waited", "waited", "{:.2f}"),
    ("cpu_pressure", "pressure", "{:.2f}"),
)


def main(argv: list[str]) -> int:
    args = _parse(argv)
    if args.draw:
        print(draw(json.loads(args.draw.read_text(encoding="utf-8"))["rows"], args.draw.with_suffix(".png")))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    machine = sorted(os.sched_getaffinity(0))
    client_cores = machine[-args.client_cores :]
    rows: list[dict[str, Any]] = []
    try:
        for name, dialect, command in args.server:
            for cores in args.cores:
                if cores + len(client_cores) > len(machine):
                    print(f"{name} on {cores} cores shares some with the load generator", file=sys.stderr)
                rows.append(measure(args, name, dialect, command, machine[:cores], client_cores))
                print(_line(rows[-1]), file=sys.stderr, flush=True)
    except (ServerFailed, LoadTestError) as error:
        print(f"core_sweep: {error}", file=sys.stderr)
        return 2
    print(f"{'server':<14}{'cores':>6}" + "".join(f"{title:>11}" for _, title, _ in _FIGURES))
    print("\n".join(map(_line, rows)))
    document = json.dumps({"rps": args.rps, "streams": args.streams, "words": args.words, "rows": rows})
    (args.out / "core_sweep.json").write_text(document, encoding="utf-8")
    try:
        print(f"plot: {draw(rows, args.out / 'core_sweep.png')}")
    except ImportError:
        print(f"no plot, matplotlib is missing: run --draw {args.out / 'core_sweep.json'} where it is installed")
    print(document)
    return 0


def measure(
    args: argparse.Namespace, name: str, dialect: str, command: str, cores: list[int], client_cores: list[int]
) -> dict[str, Any]:
    """One server on one set of cores under the load; this process and its generators stay on `client_cores`."""
    log = args.out / f"{name}-{len(cores)}.log"
    with PinnedServer(command, cores, args.ready_url, log, args.patience) as server:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, client_cores)
        try:
            run(_config(args, dialect, duration_s=args.warmup, warmup_s=0.0))
            with LoadSampler(server, skip_s=args.warmup) as load:
                summary = run(
                    _config(args, dialect, duration_s=args.warmup + args.seconds, warmup_s=args.warmup)
                ).summary
        finally:
            os.sched_setaffinity(0, before)
    return _row(name, len(cores), summary, load)


def _config(args: argparse.Namespace, dialect: str, **times: float) -> RunConfig:
    if args.streams:
        more: dict[str, Any] = {"arrival": "closed", "users": args.streams, "processes": args.processes}
    else:
        more = {"arrival": "constant", "rps": args.rps}
    lengths = {"workload": "words", "prompt_words": str(args.words), "output_tokens": str(args.tokens)}
    return RunConfig(url=args.url, dialect=dialect, model=args.model, ignore_eos=True, **lengths, **more, **times)


def _row(name: str, cores: int, summary: dict[str, Any], load: Load) -> dict[str, Any]:
    seen = {key: value for key, value in asdict(load).items() if key != "gpu_samples"}
    figures = {key: summary.get(key) for key, _, _ in _FIGURES if key not in seen}
    return {
        "server": name,
        "cores": cores,
        **figures,
        **seen,
        "valid": summary["valid"],
        "failures": summary["failures"],
    }


def _line(row: dict[str, Any]) -> str:
    cells = ("-" if row[key] is None else layout.format(row[key]) for key, _, layout in _FIGURES)
    invalid = "" if row["valid"] else "  INVALID"
    return f"{row['server']:<14}{row['cores']:>6}" + "".join(f"{cell:>11}" for cell in cells) + invalid


def draw(rows: list[dict[str, Any]], path: Path) -> Path:
    """Four panels over the number of cores, one line a server."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = (
        ("output_tokens_per_s", "output tokens/s"),
        ("ttft_ms_p50", "time to first token p50, ms"),
        ("gpu_percent", "GPU utilisation, %"),
        ("cpu_cores_waited", "server threads waiting for a core"),
    )
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6.4))
    names = list(dict.fromkeys(row["server"] for row in rows))
    all_cores = sorted({row["cores"] for row in rows})
    for axis, (key, title) in zip(axes.flat, panels, strict=True):
        for name in names:
            points = [(row["cores"], row[key]) for row in rows if row["server"] == name and row[key] is not None]
            axis.plot([x for x, _ in points], [y for _, y in points], marker="o", label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(all_cores, [str(n) for n in all_cores])
        measured = [row[key] for row in rows if row[key] is not None]
        axis.set_ylim(0, 105 if key == "gpu_percent" else 1.15 * max(measured, default=1.0) or 1.0)
        axis.set_ylabel(title)
        axis.set_xlabel("CPU cores of the server")
        axis.grid(alpha=0.25)
        if not measured:
            axis.text(0.5, 0.5, "not measured here", ha="center", transform=axis.transAxes)
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--server", nargs=3, action="append", default=[], metavar=("NAME", "DIALECT", "COMMAND"))
    add("--cores", type=lambda text: [int(n) for n in text.split(",")], default=[1, 2, 4, 8])
    add("--client-cores", type=int, default=4, help="the last so many cores drive the load")
    add("--url", default="localhost:8001")
    add("--ready-url", default="http://localhost:8000/v2/health/ready")
    add("--model", default="", help="model name (default: the dialect's)")
    add("--patience", type=float, default=600.0, help="seconds until a server must be ready")
    add("--rps", type=float, default=8.0, help="open loop at this rate")
    add("--streams", type=int, default=0, help="closed loop of so many streams instead")
    add("--processes", type=int, default=4, help="load-generating processes of the closed loop")
    add("--words", type=int, default=2000)
    add("--tokens", type=int, default=128)
    add("--seconds", type=float, default=30.0)
    add("--warmup", type=float, default=5.0)
    add("--out", type=Path, default=Path("core_sweep"))
    add("--draw", type=Path, metavar="FILE.json", help="only draw the plot of an earlier run")
    args = parser.parse_args(argv)
    if not (args.server or args.draw):
        parser.error("at least one --server NAME DIALECT COMMAND is needed")
    for name, dialect, _ in args.server:
        if dialect not in DIALECTS:
            parser.error(f"server {name}: dialect {dialect!r} is not one of {', '.join(DIALECTS)}")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
