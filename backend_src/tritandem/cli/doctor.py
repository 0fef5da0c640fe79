"""`tritandem doctor`: the checks that a start makes, as a table, without starting anything."""

from __future__ import annotations

import argparse
from typing import Any

from tritandem.contracts import ConfigError
from tritandem.server.options import ServeOptions

from .narrator import Narrator
from .server_flags import add_server_flags, server_arguments


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="check whether the server could start here",
        description="Check whether the server could start here. Exit code 0 when it could, 2 when not.",
    )
    add_server_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tritandem.server.preflight import findings
    from tritandem.server.repository import default_repository

    settings = server_arguments(args, Narrator())
    settings["repository"] = settings["repository"] or default_repository()
    results = findings(ServeOptions(**settings))
    for name, refusal in results:
        print(f"{name:<26} {_verdict(refusal)}")
    return 2 if any(refusal for _, refusal in results) else 0


def _verdict(refusal: ConfigError | None) -> str:
    return "ok" if refusal is None else f"NO: {refusal}"
