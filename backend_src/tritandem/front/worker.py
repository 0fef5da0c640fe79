"""One process of the front: its socket, its signals, its end.

SIGTERM drains: new requests get a 503, running ones finish, then it exits. It does not outlive its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from tritandem_client import AsyncClient

from ..machine.processes import end_with_parent
from ..model_facts.chat_facts import chat_templates, context_tokens
from ..model_facts.generation import sampling_defaults
from .app import ENDPOINTS, App, Site
from .ask import OPENAI_TEMPERATURE
from .books import Books
from .formats.choose import AUTO, REASONING_WORDS, TOOL_WORDS, choose, marks_thoughts
from .keys import read_keys
from .limits import Meter
from .protocol import BoundedHttp

# Between requests of one client; a proxy in front should give up earlier.
IDLE_CONNECTION_S = 75
BACKLOG = 2048
REPORT = ("finish_reason", "stop_reason", "num_input_tokens", "num_output_tokens")


class Server(uvicorn.Server):  # type: ignore[misc]
    """Leaves signals to us, and tells when it listens."""

    def __init__(self, config: Any, ready_fd: int) -> None:
        super().__init__(config)
        self._ready_fd = ready_fd

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self._ready_fd >= 0:
            with contextlib.suppress(OSError):  # nobody waits for a worker that replaces another
                os.write(self._ready_fd, b"\n")
            os.close(self._ready_fd)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tritandem.front", description="OpenAI's API in front of a Tritandem server.")
    add = parser.add_argument
    add("--grpc-url", default="127.0.0.1:8001", help="the server to ask (default: %(default)s)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=int, default=8080, help="where to listen (default: %(default)s)")
    add("--model", action="append", required=True, help="a name of the model; repeat it for further ones")
    add("--keys", type=Path, help="TOML file of API keys")
    add("--tls-cert", type=Path, help="PEM file of a certificate chain: HTTPS instead of HTTP")
    add("--tls-key", type=Path, help="PEM file of its key")
    add("--cors", action="append", default=[], help="an origin whose pages may ask, or *")
    add("--model-path", type=Path, help="folder or GGUF file, whose chat template tells the two parsers")
    add("--tool-parser", default=AUTO, choices=TOOL_WORDS, help="how the model calls functions (default: %(default)s)")
    add("--reasoning-parser", default=AUTO, choices=REASONING_WORDS, help="how it thinks (default: %(default)s)")
    add("--generation-config", default="none", help="auto: a temperature of the model's authors goes before OpenAI's")
    add("--counters-fd", type=int, default=-1, help="memory that all workers count in")
    add("--limits-fd", type=int, default=-1, help="memory in which all workers keep what is left of a key's limits")
    add("--worker", type=int, default=0, help="which of them this is")
    add("--ready-fd", type=int, default=-1, help="gets a line when the socket listens")
    add("--parent", type=int, default=0, help="process id to end with")
    return parser


def main(words: list[str] | None = None) -> None:
    args = parser().parse_args(words)
    if args.parent:
        end_with_parent()
        if os.getppid() != args.parent:
            return
    templates = chat_templates(args.model_path)
    formats = choose(templates, args.tool_parser, args.reasoning_parser, prompts_of(templates))
    authors = sampling_defaults(args.model_path) if args.generation_config == "auto" else {}
    site = Site(
        tuple(args.model),
        read_keys(args.keys),
        tuple(args.cors),
        formats,
        context_tokens(args.model_path),
        temperature=None if "temperature" in authors else OPENAI_TEMPERATURE,
    )
    books = Books(ENDPOINTS, args.counters_fd, args.worker)
    uvloop.run(serve(site, books, args))


def prompts_of(templates: Sequence[str]) -> list[str]:
    """Whose end tells whether a thought is open there; none of models that mark no thoughts."""
    if not marks_thoughts(templates):
        return []
    from ..tokenizer.chats.chat_template import prompt_to_answer  # and a template engine, which few need

    return [prompt for one in templates if (prompt := prompt_to_answer(one)) is not None]


async def serve(site: Site, books: Books, args: argparse.Namespace) -> None:
    """Until SIGTERM, and then until the last request has ended."""
    async with AsyncClient(args.grpc_url, timeout_s=None, stop_on_close=True, report=REPORT) as client:
        app = App(site, client, books, Meter(args.limits_fd, args.worker))
        config = uvicorn.Config(
            app,
            http=BoundedHttp,
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=IDLE_CONNECTION_S,
            ssl_certfile=args.tls_cert,
            ssl_keyfile=args.tls_key,
        )
        server = Server(config, args.ready_fd)

        async def drain() -> None:
            await app.drain()
            server.should_exit = True

        drains: set[asyncio.Task[None]] = set()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: drains.add(loop.create_task(drain())))
        await server.serve([listen(args.host, args.port)])


def listen(host: str, port: int) -> socket.socket:
    """A socket of its own on an address that all workers share; the kernel deals connections out."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listener.bind((host, port))
    return listener
