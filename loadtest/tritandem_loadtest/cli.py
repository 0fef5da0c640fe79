"""The command line: flags -> RunConfig, progress on stderr, table and one JSON line (the last one) on stdout.

A terminal gets no JSON line: its 3,000 characters would push the table off the screen.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .config import ARRIVALS, GRPC_CLIENTS, PROTOCOLS, WORKLOADS, LoadTestError, RunConfig, parse_slo
from .dialects import DIALECTS
from .report import Report
from .runner import read_report, run

EXIT_OK, EXIT_SLO_MISSED, EXIT_USAGE, EXIT_INVALID = 0, 1, 2, 3
EXIT_INTERRUPTED = 130  # as a shell says of Ctrl-C
_CONNECT_S = 5.0
_DEFAULTS = RunConfig()


def add_command(subparsers: Any) -> argparse.ArgumentParser:
    """Mount `loadtest` under another command line; the chosen function is `args.func(args) -> exit code`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "loadtest", help="open-loop load with streaming metrics", description="Drive a streaming LLM server."
    )
    _configure(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tritandem-loadtest", description="Drive a streaming LLM server.")
    _configure(parser)
    args = parser.parse_args(argv)
    return int(args.func(args))


def _configure(parser: argparse.ArgumentParser) -> None:
    _add_flags(parser)
    parser.add_argument("--rps", type=float, default=_DEFAULTS.rps, help="requests a second (open loop)")
    parser.set_defaults(func=_run_command, program=parser.prog)
    commands = parser.add_subparsers(title="more", metavar="[sweep|report]")
    sweep = commands.add_parser("sweep", help="find the highest rate that keeps the SLO")
    _add_flags(sweep)
    sweep.add_argument("--rps", type=_rates, required=True, help="rates to try in rising order, such as 1,2,4,8")
    sweep.set_defaults(func=_sweep_command)
    again = commands.add_parser("report", help="compute a report again from the stamps of a finished run")
    again.add_argument("directory", type=Path, help="--out of the run, or --stamps-dir of Locust")
    again.set_defaults(func=_report_command)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of RunConfig but `rps`, named after it; those with a choice or a syntax are explicit."""
    add = parser.add_argument
    add("--url", default=_DEFAULTS.url, help="HOST:PORT of gRPC, or the http(s):// base URL (default %(default)s)")
    add("--protocol", choices=PROTOCOLS, default=_DEFAULTS.protocol)
    add("--grpc-client", choices=GRPC_CLIENTS, default=_DEFAULTS.grpc_client, help="grpcio: slower, for comparison")
    add("--dialect", choices=sorted(DIALECTS), default=_DEFAULTS.dialect, help="whose tensor names to speak")
    add("--model", default="", help="model name (default: the dialect's)")
    add("--header", dest="headers", type=_header, action="append", default=[], metavar="NAME:VALUE",
        help="of every request, such as 'Authorization: Bearer KEY'; kept in no file")  # fmt: skip
    add("--arrival", choices=ARRIVALS, default=_DEFAULTS.arrival, help="arrival process; closed: --users streams busy")
    add("--duration", dest="duration_s", type=float, default=_DEFAULTS.duration_s, metavar="SECONDS")
    add("--burstiness", type=float, default=_DEFAULTS.burstiness, help="gamma: coefficient of variation of gaps")
    add("--ramp-to", dest="ramp_to_rps", type=float, default=0.0, metavar="RPS")
    add("--steps", dest="steps_rps", type=_rates, default=(), metavar="RPS,RPS,...")
    add("--trace", default="", help="CSV or JSONL with time, prompt_tokens, output_tokens")
    add("--requests", dest="max_requests", type=int, default=0, help="stop after so many (0: by duration)")
    add("--users", type=int, default=0, help="streams in flight at most (0: 20 seconds of --rps)")
    add("--processes", type=int, default=1, help="load-generating processes")
    add("--connections", type=int, default=_DEFAULTS.connections, help="gRPC connections of each process")
    add("--workload", choices=WORKLOADS, default=_DEFAULTS.workload)
    add("--prompt-words", default=_DEFAULTS.prompt_words, help="N, uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA")
    add("--output-tokens", default=_DEFAULTS.output_tokens, help="same syntax; sent as max_tokens")
    add("--prompt-pool", type=int, default=0, metavar="N", help="words: N prompts again and again (0: none twice)")
    add("--shared-prefix-words", type=int, default=_DEFAULTS.shared_prefix_words)
    add("--shared-prefixes", type=int, default=_DEFAULTS.shared_prefixes, help="how many different ones")
    add("--chat-turns", type=int, default=_DEFAULTS.chat_turns)
    add("--prompts", default="", metavar="FILE", help="JSONL for --workload jsonl")
    add("--ignore-eos", action="store_true", help="always generate --output-tokens tokens")
    add("--sampling", type=_json_object, default={}, metavar="JSON", help='such as {"temperature": 0.7}')
    add("--seed", type=int, default=0)
    add("--slo", type=_slo, default={}, metavar="METRIC=MS,...", help="such as ttft=500ms,itl=50ms")
    add("--slo-percentile", type=float, default=_DEFAULTS.slo_percentile)
    add("--late-after-ms", type=float, default=_DEFAULTS.late_after_ms, help="a request sent later is missed")
    add("--warmup", dest="warmup_s", type=float, default=0.0, metavar="SECONDS", help="sent but not counted")
    add("--timeout", dest="timeout_s", type=float, default=_DEFAULTS.timeout_s, metavar="SECONDS")
    add("--drain", dest="drain_s", type=float, default=_DEFAULTS.drain_s, metavar="SECONDS")
    add("--out", dest="out_dir", default="", metavar="DIR", help="raw stamps, figures and report.html go here")
    add("--quiet", action="store_true", help="no progress")


def _config(args: argparse.Namespace, **changes: Any) -> RunConfig:
    values = {f.name: getattr(args, f.name) for f in fields(RunConfig)}
    return RunConfig(**{**values, "headers": dict(args.headers), **changes})


def _run_command(args: argparse.Namespace) -> int:
    try:
        config = _config(args)
        check_reachable(config.url)
        report = run(config, None if args.quiet else show_progress)
        _leave_progress_line(args)
    except LoadTestError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        so_far = f"; what was measured: {args.program} report {args.out_dir}" if args.out_dir else ""
        print(f"\nloadtest: interrupted{so_far}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return _show(report, Path(args.out_dir) if args.out_dir else None)


def _report_command(args: argparse.Namespace) -> int:
    try:
        config = RunConfig.from_json((args.directory / "config.json").read_text(encoding="utf-8"))
        report = read_report(config, sorted(args.directory.glob("stamps-*.jsonl")))
    except (LoadTestError, OSError) as error:
        print(f"loadtest report: {error}", file=sys.stderr)
        return EXIT_USAGE
    report.write(args.directory)
    return _show(report, args.directory)


def _show(report: Report, directory: Path | None) -> int:
    print(report.table())
    if directory is not None:
        print(f"report: {directory / 'report.html'}")
    _print_json(report.json_line())
    if not report.valid:
        return EXIT_INVALID
    return EXIT_OK if report.summary["slo_met"] else EXIT_SLO_MISSED


def _sweep_command(args: argparse.Namespace) -> int:
    from .sweep import sweep

    try:
        base = _config(args, rps=args.rps[0])
        check_reachable(base.url)
        result = sweep(base, args.rps, None if args.quiet else show_progress)
        _leave_progress_line(args)
        if args.out_dir:
            result.write(Path(args.out_dir))
    except LoadTestError as error:
        print(f"loadtest sweep: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("\nloadtest sweep: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    print(result.table())
    _print_json(result.json_line())
    return EXIT_OK if result.best_rps is not None else EXIT_SLO_MISSED


def check_reachable(url: str) -> None:
    """Raises LoadTestError where nobody listens: better than a whole run of failures. Malformed: the transport's task.

    A server that goes away later is part of what is measured.
    """
    try:
        parts = urlsplit(url if "://" in url else f"//{url}")
        host, port = parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return
    if not host or not port:
        return
    try:
        socket.create_connection((host, port), _CONNECT_S).close()
    except OSError as error:
        raise LoadTestError(f"url: nothing answers at {host}:{port} ({error}); give the address of a server") from None


def _print_json(line: str) -> None:
    if not sys.stdout.isatty():
        print(line)


def _leave_progress_line(args: argparse.Namespace) -> None:
    if not args.quiet and sys.stderr.isatty():
        print(file=sys.stderr)


def show_progress(at_s: float, counts: dict[str, int]) -> None:
    """One line a second on stderr, rewritten in place in a terminal."""
    line = f"{at_s:6.0f} s   sent {counts['sent']}   done {counts['done']}   failed {counts['failed']}   "
    line += f"tokens {counts['tokens']}"
    print(line, file=sys.stderr, end="\r" if sys.stderr.isatty() else "\n", flush=True)


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError(f"given {text!r}, allowed: NAME:VALUE")
    return name.strip(), value.strip()


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"given {text!r}, allowed: rates such as 1,2,4") from None


def _slo(text: str) -> dict[str, float]:
    try:
        return parse_slo(text)
    except LoadTestError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"given {text!r}, not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"given {text!r}, allowed: a JSON object")
    return value
