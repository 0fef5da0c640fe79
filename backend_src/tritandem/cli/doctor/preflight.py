"""`tritandem doctor --preflight`: the checks that a start makes, as a table, without starting anything."""

from __future__ import annotations

import argparse

from tritandem.contracts.errors import ConfigError
from tritandem.server.options import ServeOptions

from ..narrator import Narrator
from ..server_flags import server_arguments


def check_start(args: argparse.Namespace) -> bool:
    """Print every check with its refusal; whether a server could start."""
    from tritandem.server.preflight import findings
    from tritandem.server.repository import default_repository

    settings = server_arguments(args, Narrator())
    settings["repository"] = settings["repository"] or default_repository()
    results = findings(ServeOptions(**settings))
    for name, refusal in results:
        print(f"{name:<26} {_verdict(refusal)}")
    return not any(refusal for _, refusal in results)


def _verdict(refusal: ConfigError | None) -> str:
    return "ok" if refusal is None else f"NO: {refusal}"
