"""The command line: flags -> RunConfig, progress on stderr, table and one JSON line (the last one) on stdout.

A terminal gets no JSON line: its 3,000 characters would push the table off the screen.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .config import LoadTestError, RunConfig, parse_rates, settings
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
    sweep.add_argument(
        "--rps", type=_argument(parse_rates), required=True, help="rates to try in rising order, such as 1,2,4,8"
    )
    sweep.set_defaults(func=_sweep_command)
    again = commands.add_parser("report", help="compute a report again from the stamps of a finished run")
    again.add_argument("directory", type=Path, help="--out of the run, or --stamps-dir of Locust")
    again.set_defaults(func=_report_command)


def _add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field of RunConfig but `rps`."""
    for name, setting in settings().items():
        flag, default = setting.flag or "--" + name.replace("_", "-"), getattr(_DEFAULTS, name)
        told = "" if setting.parse or default in ("", 0, False) else " (default: %(default)s)"
        more: dict[str, Any] = {"dest": name, "default": default, "help": setting.doc + told}
        if isinstance(default, bool):
            more["action"] = "store_true"
        else:
            more |= {"type": type(default), "choices": setting.choices, "metavar": setting.metavar}
        if setting.parse:
            more["type"] = _argument(setting.parse)
        if name == "headers":
            more |= {"action": "append", "default": []}
        if name != "rps":
            parser.add_argument(flag, **more)
    parser.add_argument("--quiet", action="store_true", help="no progress")


def _argument(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A type for argparse, which shows the text of its own error alone."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except LoadTestError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


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
