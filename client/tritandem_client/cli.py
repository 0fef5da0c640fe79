"""The commands `generate` and `chat`: arguments, and what becomes of them.

Owns command-line options and exit codes. Knows nothing about how answers are printed (terminal.py) or
fetched. One thread; Ctrl-C arrives as KeyboardInterrupt.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, cast

from tritandem_client.client import Client
from tritandem_client.errors import ConnectionFailed, InvalidRequest, ServerNotReady, TritandemClientError
from tritandem_client.request import PRIORITIES, Options
from tritandem_client.terminal import Chat, describe, show

EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_UNREACHABLE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

# One option each: name of the keyword, type, help. Whatever is not given is left to the server.
_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("max_tokens", int, "tokens to generate at most"),
    ("min_tokens", int, "no end before this many tokens"),
    ("temperature", float, "0 is greedy"),
    ("top_k", int, "sample among the k most likely tokens"),
    ("top_p", float, "sample within this share of the probability"),
    ("min_p", float, "drop tokens less likely than this share of the likeliest"),
    ("seed", int, "fixes the random choices; without it every request makes others"),
    ("repetition_penalty", float, "1 is off"),
    ("presence_penalty", float, "0 is off"),
    ("frequency_penalty", float, "0 is off"),
    ("deadline_ms", int, "the server gives up after this long"),
    ("tenant", str, "whose fair share this counts against"),
    ("request_id", str, "instead of a random one"),
    ("traceparent", str, "W3C trace context of the span above"),
)


def add_commands(subparsers: Any) -> None:
    """Add `generate` and `chat` to the subparsers of a larger command; `args.run(args)` returns the exit code."""
    generate = subparsers.add_parser("generate", help="answer one prompt", description="Answer one prompt.")
    generate.add_argument("prompt", help="the text to continue; - reads it from standard input")
    generate.add_argument("--chat", action="store_true", help="as a user's message, with the model's chat template")
    generate.add_argument("--system", help="with --chat: the system message")
    generate.set_defaults(run=run_generate)
    chat = subparsers.add_parser(
        "chat",
        help="talk to the model",
        description="Talk to the model. /reset forgets, /system TEXT sets the system message, /exit or Ctrl-D ends.",
    )
    chat.add_argument("--system", help="the system message")
    chat.set_defaults(run=run_chat)
    for parser in (generate, chat):
        _add_server_options(parser)
        _add_sampling_options(parser)
        parser.add_argument("--json", action="store_true", help="one JSON document per answer instead of text")
        parser.add_argument("--stats", action="store_true", help="a line with counts and times on standard error")


def run_generate(args: argparse.Namespace) -> int:
    """The exit code of `generate`."""
    if args.system is not None and not args.chat:
        return _complain("--system needs --chat", EXIT_USAGE)
    try:
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    except UnicodeDecodeError as error:
        return _complain(f"standard input is not UTF-8: {error}", EXIT_USAGE)
    try:
        with _client(args) as client:
            if args.chat:
                system = [] if args.system is None else [{"role": "system", "content": args.system}]
                stream = client.chat_stream([*system, {"role": "user", "content": prompt}], **_options(args))
            else:
                stream = client.stream(prompt, **_options(args))
            result = show(stream, as_json=args.json, stats=args.stats)
    except TritandemClientError as error:
        return _complain(describe(error), exit_code(error))
    except (ValueError, FileNotFoundError) as error:  # a malformed address, no such PEM file
        return _complain(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return EXIT_INTERRUPTED if result.outcome == "CANCELLED" else EXIT_OK


def run_chat(args: argparse.Namespace) -> int:
    """The exit code of `chat`."""
    try:
        with _client(args) as client:
            chat = Chat(client, _options(args), system=args.system, as_json=args.json, stats=args.stats)
            return EXIT_OK if chat.run() else EXIT_UNREACHABLE
    except (ValueError, FileNotFoundError) as error:
        return _complain(str(error), EXIT_USAGE)


def exit_code(error: TritandemClientError) -> int:
    if isinstance(error, InvalidRequest):
        return EXIT_USAGE
    return EXIT_UNREACHABLE if isinstance(error, (ConnectionFailed, ServerNotReady)) else EXIT_FAILED


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m tritandem_client generate|chat ...`"""
    parser = argparse.ArgumentParser(prog="tritandem-client", description="Answers from a language model on Triton.")
    add_commands(parser.add_subparsers(required=True, metavar="generate|chat"))
    args = parser.parse_args(arguments)
    try:
        code: int = args.run(args)
    except BrokenPipeError:  # the reader of our output has gone, as in `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    return code


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    server = parser.add_argument_group("server")
    server.add_argument("--url", help="host:port, or grpc://, grpcs://, http://, https:// (default: 127.0.0.1)")
    server.add_argument("--protocol", choices=("grpc", "http"), help="default: grpc")
    server.add_argument("--model", default="scheduler", help="default: %(default)s")
    server.add_argument("--timeout-s", type=float, default=600.0, help="default: %(default)s")
    server.add_argument(
        "--retries",
        type=int,
        default=0,
        help="tries more when the server is full or cannot be reached (default: %(default)s)",
    )
    server.add_argument("--ca-file", help="PEM roots for grpcs:// and https://")
    server.add_argument(
        "--header",
        dest="headers",
        action="append",
        type=_header,
        default=[],
        metavar="NAME:VALUE",
        help="such as 'Authorization: Bearer KEY' (repeatable)",
    )


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    sampling = parser.add_argument_group("sampling")
    for name, kind, text in _SAMPLING:
        sampling.add_argument("--" + name.replace("_", "-"), type=kind, help=text)
    sampling.add_argument(
        "--stop", dest="stop_words", action="append", metavar="TEXT", help="stop at this text (repeatable)"
    )
    sampling.add_argument(
        "--bad-word", dest="bad_words", action="append", metavar="TEXT", help="a text that must not appear (repeatable)"
    )
    sampling.add_argument("--logprobs", type=int, metavar="N", help="with --json: N alternatives per token")
    sampling.add_argument("--priority", choices=PRIORITIES)


def _options(args: argparse.Namespace) -> Options:
    names = (*(name for name, _, _ in _SAMPLING), "stop_words", "bad_words", "logprobs", "priority")
    return cast(Options, {name: value for name in names if (value := getattr(args, name)) is not None})


def _client(args: argparse.Namespace) -> Client:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its log lines would land among the answers on the terminal
    return Client(
        args.url,
        protocol=args.protocol,
        model=args.model,
        timeout_s=args.timeout_s,
        retries=args.retries,
        ca_file=args.ca_file,
        headers=dict(args.headers),
    )


def _header(text: str) -> tuple[str, str]:
    """As curl takes them, such as `Authorization: Bearer KEY`."""
    name, colon, value = text.partition(":")
    if not colon or not name.strip():
        raise argparse.ArgumentTypeError(f"given {text!r}, allowed: NAME:VALUE")
    return name.strip(), value.strip()


def _complain(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code
