"""The command: where to look, for how long, what to print. Exit codes are `verdict.Severity`, and 2 for a refusal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tritandem.contracts.errors import ConfigError

from ..narrator import Narrator
from ..numbers import number
from ..server_flags import add_server_flags, server_arguments

if TYPE_CHECKING:
    from .sample import Sample
    from .verdict import Diagnosis

LOCAL_URL = "127.0.0.1:8002"
EXIT_REFUSED = 2
MIN_SECONDS, MAX_SECONDS = 1.0, 3600.0
LOOKS = 10

DESCRIPTION = """
Say what limits a running server: samples its metrics for a while and names the bottleneck, with the evidence and what
to change. Where no server runs, look at the machine instead. Exit code 0: nothing to change; 3: requests wait, or
clients do not take what they get; 4: the CPU holds up the device; 2: nothing could be sampled, or (--preflight) the
server could not start.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor", help="say what limits a running server, or whether one could start here", description=DESCRIPTION
    )
    parser.add_argument(
        "--url", metavar="HOST:PORT", help=f"the server's metrics port (default: {LOCAL_URL} if it answers)"
    )
    parser.add_argument(
        "--seconds",
        type=number(MIN_SECONDS, MAX_SECONDS),
        default=10.0,
        help="how long to observe the server (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    preflight = parser.add_argument_group("before a start")
    preflight.add_argument("--preflight", action="store_true", help="make the checks of a start with the flags below")
    add_server_flags(preflight)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """The exit code. Raises ConfigError for a URL that gives no metrics, or none that move in the time given."""
    if args.preflight:
        return _check_start(args)
    from .sample import fetch, metrics_url

    url = metrics_url(LOCAL_URL if args.url is None else args.url)
    try:
        before = fetch(url)
    except ConfigError as error:
        if args.url is not None:
            raise
        print(f"tritandem: {error}", file=sys.stderr)
        print(
            "tritandem: looking at this machine instead; `doctor --preflight` says whether a server could start",
            file=sys.stderr,
        )
        return _tell(_examine_machine(args.seconds), "this machine", args.json)
    between = _look_on(url, before, args.seconds)
    from .sample import Pair
    from .signals import published
    from .verdict import judge

    pair = Pair(before, fetch(url), between)
    if not published(pair):
        raise ConfigError(
            f"--seconds: given {args.seconds:g}, allowed: more than the server's telemetry.metrics_period_s; it "
            "published nothing in that time"
        )
    return _tell(judge(pair), url, args.json)


def _tell(diagnosis: Diagnosis, source: str, as_json: bool) -> int:
    from .report import document, text

    print(json.dumps(document(diagnosis, source)) if as_json else text(diagnosis, source))
    return int(diagnosis.finding.severity)


def _look_on(url: str, before: Sample, seconds: float) -> list[Sample]:
    """Looks at even distances in the seconds after `before`. One that fails is not missed."""
    from .sample import fetch

    looks: list[Sample] = []
    end_s = before.at_s + seconds
    while (left_s := end_s - time.monotonic()) > 0:
        time.sleep(min(left_s, seconds / LOOKS))
        if time.monotonic() < end_s:
            with suppress(ConfigError):
                looks.append(fetch(url))
    return looks


def _examine_machine(seconds: float) -> Diagnosis:
    from .machine import judge_machine, read

    before = read()
    time.sleep(seconds)
    return judge_machine(before, read())


def _check_start(args: argparse.Namespace) -> int:
    """Print every check that a start makes, with its refusal; nothing is started."""
    from tritandem.server.options import ServeOptions
    from tritandem.server.preflight import findings
    from tritandem.server.repository import default_repository

    settings = server_arguments(args, Narrator())
    settings["repository"] = settings["repository"] or default_repository()
    results = findings(ServeOptions(**settings))
    for name, refusal in results:
        print(f"{name:<26} {'ok' if refusal is None else f'NO: {refusal}'}")
    return EXIT_REFUSED if any(refusal for _, refusal in results) else 0
