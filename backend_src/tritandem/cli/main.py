"""The dispatcher: finds the subcommand, runs it, turns refusals into one line and exit code 2.

A subcommand is a module with `add_parser(subparsers)`; what it parses into has `run(args) -> exit code`. Modules are
imported for `--help` too, so that heavy libraries are imported inside `run` only.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from tritandem import __version__
from tritandem.contracts.errors import ConfigError

from . import demo, doctor, model, serve, size

EXIT_REFUSED, EXIT_BROKEN_PIPE, EXIT_INTERRUPTED = 2, 1, 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tritandem", description="Serve a language model on NVIDIA Triton.")
    parser.add_argument("--version", action="version", version=f"tritandem {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (serve, demo, model, doctor, size):
        command.add_parser(subparsers)
    _add_client_commands(subparsers)
    _add_loadtest_command(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: the subcommand's own, 2 for a refusal or wrong usage, 130 after Ctrl-C."""
    parser = build_parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown and not getattr(args, "passes_unknown_flags", False):
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.unknown = unknown
    try:
        # The load test names its entry point `func`, all others `run`.
        run = args.run if hasattr(args, "run") else args.func
        return int(run(args))
    except ConfigError as error:
        print(f"tritandem: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE


def _add_client_commands(subparsers: Any) -> None:
    from tritandem_client.cli import add_commands

    add_commands(subparsers)


def _add_loadtest_command(subparsers: Any) -> None:
    if find_spec("tritandem_loadtest") is None:
        missing = subparsers.add_parser("loadtest", help="open-loop load with streaming metrics (not installed)")
        missing.set_defaults(run=demo.refuse_without_loadtest, passes_unknown_flags=True)
        return
    from tritandem_loadtest import add_command

    add_command(subparsers)
