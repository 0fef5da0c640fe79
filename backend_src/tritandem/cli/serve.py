"""`tritandem serve`: run the server in the foreground until Ctrl-C."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from .narrator import Narrator
from .numbers import seconds, whole
from .server_flags import add_server_flags, front_options, server_arguments


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="start the server and keep it running",
        description="Start Triton with the model repository and keep it running. Ctrl-C or SIGTERM drains: running "
        "requests finish, new ones are refused; a second one ends it at once. Flags that are not listed here are "
        "handed to tritonserver.",
    )
    add_server_flags(parser)
    parser.add_argument(
        "--ready-timeout-s",
        type=seconds,
        default=600.0,
        metavar="SECONDS",
        help="how long loading the model may take (default: %(default)s)",
    )
    parser.add_argument(
        "--max-restarts",
        type=whole(0),
        metavar="N",
        help="starts in a row after a server that has been ready dies (default: no limit; the pauses grow up to 30 s)",
    )
    parser.add_argument(
        "--no-restart", dest="max_restarts", action="store_const", const=0, help="same as --max-restarts 0"
    )
    parser.set_defaults(run=run, passes_unknown_flags=True)


def run(args: argparse.Namespace) -> int:
    """Exit code: 0 after a clean stop, 1 when the server could not be kept up, 130 when it was cut short."""
    from tritandem.server import TritonServer
    from tritandem.server.backoff import RestartPolicy
    from tritandem.server.front_workers import FrontWorkers
    from tritandem.server.supervisor import Supervisor

    say = Narrator()
    front, settings = front_options(args), server_arguments(args, say)

    def make_server() -> TritonServer:
        server = TritonServer(ready_timeout_s=args.ready_timeout_s, say=say, **settings)
        say(f"starting Triton on {server.options.repository}, model {server.options.model}; log: {server.log_path}")
        return server

    def on_ready(server: TritonServer) -> None:
        say(f"ready: gRPC {server.grpc_url}, HTTP http://{server.http_url}, metrics {server.metrics_url}")
        if front:
            say(f"OpenAI API: {front.base_url(server.options)}, model {front.models[0]}")
        say(f'try: {_program()} generate "What is the capital of France?" --chat' + _url_flag(server))

    policy = RestartPolicy(max_restarts=args.max_restarts)
    return Supervisor(make_server, policy, say, FrontWorkers(front, say) if front else None).run(on_ready)


def _program() -> str:
    """What to type for this command: its name where the shell finds it, else its place beside the interpreter."""
    if shutil.which("tritandem"):
        return "tritandem"
    return os.path.relpath(Path(sys.executable).parent / "tritandem")


def _url_flag(server: Any) -> str:
    return "" if server.options.grpc_port == 8001 else f" --url {server.grpc_url}"
