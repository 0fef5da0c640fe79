"""How much CPU does a server need? The same load against a server pinned to 1, 2, 4, 8 ... cores.

Starts each server on each number of cores, drives it from other cores, and plots throughput, time to first token, GPU
utilisation and CPU pressure against cores. Prints a table and, as the last line, one JSON document. With `--one-start`
each server starts once and is moved: quicker, but it has chosen its thread counts for all cores, and what it had pinned
itself is pinned no more.

    python -m tritandem_bench.core_sweep --cores 1,2,4,8 --rps 8 --words 2000 \\
        --server tritandem tritandem "tritandem serve --model DIR" \\
        --server vllm vllm "tritonserver --model-repository=vllm_repository"
    python -m tritandem_bench.core_sweep --draw long_prompts/core_sweep.json saturation/core_sweep.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tritandem_loadtest import LoadTestError, RunConfig, run
from tritandem_loadtest.dialects import DIALECTS
from tritandem_loadtest.page import BLUE, GREEN, GREY, ORANGE, page

from .pinned_server import Load, LoadSampler, PinnedServer, ServerFailed
from .word_loads import add_prompts_flag, closed, head, line, per_request, word_load

_FIGURES = {
    "output_tokens_per_s": ("tokens/s", "{:.0f}"),
    "achieved_rps": ("sent/s", "{:.2f}"),
    "ttft_ms_p50": ("TTFT p50", "{:.1f}"),
    "ttft_ms_p99": ("TTFT p99", "{:.1f}"),
    "itl_ms_p50": ("ITL p50", "{:.2f}"),
    "itl_ms_p99": ("ITL p99", "{:.2f}"),
    "e2e_ms_p50": ("e2e p50", "{:.0f}"),
    "input_tokens_per_request": ("in tok/req", "{:.0f}"),
    "cached_tokens_per_request": ("cached/req", "{:.0f}"),
    "failed": ("failed", "{}"),
    "gpu_percent": ("GPU %", "{:.0f}"),
    "cpu_cores_used": ("cores used", "{:.2f}"),
    "cpu_cores_waited": ("waited", "{:.2f}"),
    "cpu_pressure": ("pressure", "{:.2f}"),
}


def main(argv: list[str]) -> int:
    args = _parse(argv)
    if args.draw:
        documents = [json.loads(path.read_text(encoding="utf-8")) for path in args.draw]
        print(draw(documents, args.draw[0].with_suffix(".html")))
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    try:
        for name, dialect, command in args.server:
            measured = []
            for row in measure_server(args, name, dialect, command):
                measured.append(row)
                print(_line(row), file=sys.stderr, flush=True)
            rows += sorted(measured, key=lambda row: row["cores"])
    except (ServerFailed, LoadTestError) as error:
        print(f"core_sweep: {error}", file=sys.stderr)
        return 2
    print(head(f"{'server':<14}{'cores':>6}", _FIGURES))
    print("\n".join(map(_line, rows)))
    document = {"load": describe_load(args), "tokens": args.tokens, "one_start": args.one_start, "rows": rows}
    (args.out / "core_sweep.json").write_text(json.dumps(document), encoding="utf-8")
    print(f"charts: {draw([document], args.out / 'core_sweep.html')}")
    print(json.dumps(document))
    return 0


def describe_load(args: argparse.Namespace) -> str:
    """The title of the load in tables and plots, unless `--title` gives one."""
    load = f"{args.streams} streams" if args.streams else f"{args.rps:g} requests/s"
    pool = f", pool of {args.prompt_pool}" if args.prompt_pool else ""
    return args.title or f"{load}, {args.words} words in, {args.tokens} tokens out{pool}"


def measure_server(args: argparse.Namespace, name: str, dialect: str, command: str) -> Iterator[dict[str, Any]]:
    """A row for each number of cores; this process and its generators stay on the last cores, the clients'.

    Raises ServerFailed, LoadTestError.
    """
    machine = sorted(os.sched_getaffinity(0))
    client_cores = machine[-args.client_cores :]
    for cores in args.cores:
        if cores + len(client_cores) > len(machine):
            print(f"{name} on {cores} cores shares some with the load generator", file=sys.stderr)
    log = args.out / f"{name}.log"
    if args.one_start:
        all_cores = machine[: max(len(machine) - len(client_cores), *args.cores)]
        with PinnedServer(command, all_cores, args.ready_url, log, args.patience) as server:
            for cores in sorted(args.cores, reverse=True):
                server.move_to(machine[:cores])
                yield measure(args, server, name, dialect, cores, client_cores)
        return
    for cores in args.cores:
        log = args.out / f"{name}-{cores}.log"
        with PinnedServer(command, machine[:cores], args.ready_url, log, args.patience) as server:
            yield measure(args, server, name, dialect, cores, client_cores)


def measure(
    args: argparse.Namespace, server: PinnedServer, name: str, dialect: str, cores: int, client_cores: list[int]
) -> dict[str, Any]:
    """The load against `server`. Prompts differ from those of the warm-up and of every other number of cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, client_cores)
    try:
        run(_config(args, dialect, seed=2 * cores, duration_s=args.warmup, warmup_s=0.0))
        duration_s = args.warmup + args.seconds
        with LoadSampler(server, skip_s=args.warmup) as load:
            config = _config(args, dialect, seed=2 * cores + 1, duration_s=duration_s, warmup_s=args.warmup)
            summary = run(config).summary
    finally:
        os.sched_setaffinity(0, before)
    if not summary["completed"]:
        raise LoadTestError(f"{name} on {cores} cores completed nothing: {summary['failures']}")
    return _row(name, cores, summary, load)


def _config(args: argparse.Namespace, dialect: str, **times: Any) -> RunConfig:
    arrival = closed(args.streams, args.processes) if args.streams else {"rps": args.rps}
    more = {"dialect": dialect, "prompt_pool": args.prompt_pool, **arrival, **times}
    return word_load(args.url, args.model, args.words, args.tokens, **more)


def _row(name: str, cores: int, summary: dict[str, Any], load: Load) -> dict[str, Any]:
    seen = {key: value for key, value in asdict(load).items() if key != "gpu_samples"}
    known = {**summary, **per_request(summary)}
    figures = {key: known.get(key) for key in _FIGURES if key not in seen}
    return {
        "server": name,
        "cores": cores,
        **figures,
        **seen,
        "valid": summary["valid"],
        "failures": summary["failures"],
    }


def _line(row: dict[str, Any]) -> str:
    return line(f"{row['server']:<14}{row['cores']:>6}", row, _FIGURES)


_CHARTS = {
    "output_tokens_per_s": "output tokens/s",
    "ttft_ms_p50": "time to first token p50, ms",
    "ttft_ms_p99": "time to first token p99, ms",
    "gpu_percent": "GPU utilisation, %",
    "cpu_cores_waited": "server threads waiting for a core",
}
_LOG_ABOVE = 15.0  # figures that differ by more get a logarithmic axis: else one server is a line at zero


def draw(documents: list[dict[str, Any]], path: Path) -> Path:
    """A page with a chart for each load and figure, one line a server; hollow points: failed or invalid."""
    servers = dict.fromkeys(row["server"] for document in documents for row in document["rows"])
    colours = dict(zip(servers, itertools.cycle((BLUE, ORANGE, GREEN, GREY)), strict=False))
    charts = []
    for document, (key, title) in itertools.product(documents, _CHARTS.items()):
        rows = [row for row in document["rows"] if row[key] is not None]
        xs = sorted({row["cores"] for row in rows})
        lines = []
        for server, colour in colours.items():
            mine = {row["cores"]: row for row in rows if row["server"] == server}
            ys = [mine[x][key] if x in mine else None for x in xs]
            lines.append([server, colour, ys, [x in mine and not _sound(mine[x]) for x in xs]])
        values = [row[key] for row in rows] or [0.0]
        chart = {"title": f"{document['load']}: {title}", "xs": xs, "unit": "CPU cores of the server", "lines": lines}
        charts.append({**chart, "log": max(values) > _LOG_ABOVE * min(values) > 0})
    facts = "hollow: some request failed, or the run was invalid"
    path.write_text(page({"title": "Load over CPU cores", "facts": facts, "charts": charts}), encoding="utf-8")
    return path


def _sound(row: dict[str, Any]) -> bool:
    return row["valid"] and not row["failed"]


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
    one_start = "start each server once, on all cores but the clients', and move it"
    add("--one-start", action="store_true", help=one_start)
    add("--streams", type=int, default=0, help="closed loop of so many streams instead")
    add("--processes", type=int, default=4, help="load-generating processes of the closed loop")
    add("--words", type=int, default=2000)
    add("--tokens", type=int, default=128)
    add_prompts_flag(parser)
    add("--seconds", type=float, default=30.0)
    add("--warmup", type=float, default=5.0)
    add("--out", type=Path, default=Path("core_sweep"))
    add("--title", default="", help="of the load, in the charts")
    add("--draw", type=Path, nargs="+", metavar="FILE.json", help="only draw one page of earlier runs")
    args = parser.parse_args(argv)
    if not (args.server or args.draw):
        parser.error("at least one --server NAME DIALECT COMMAND is needed")
    for name, dialect, _ in args.server:
        if dialect not in DIALECTS:
            parser.error(f"server {name}: dialect {dialect!r} is not one of {', '.join(DIALECTS)}")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
