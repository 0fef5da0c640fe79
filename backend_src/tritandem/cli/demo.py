"""`tritandem demo`: model, server, one streamed answer, a short load, a table, one JSON line; proves that it works.

Progress goes to standard error; the answer, the table and the last line (one JSON document) to standard output.
"""

from __future__ import annotations

import argparse
import json
import ssl
import time
import urllib.request
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NoReturn

from tritandem.contracts.errors import ConfigError
from tritandem.models.catalog import DEFAULT_MODEL
from tritandem.server.logfile import progress

from .narrator import Narrator
from .server_flags import add_server_flags, front_options, server_arguments

QUESTION, EXPECTED_WORD = "What is the capital of France?", "Paris"
ANSWER_TOKENS = 32
TARGET_RPS = 8.0
LOAD_S = 20.0
PROGRESS_EVERY_S = 5.0
LOAD_OUTPUT_TOKENS = "4"  # short questions, short answers: sized for two cores without a GPU
RATE_TOLERANCE = 0.05
EXIT_OK, EXIT_FAILED = 0, 1
# Keys of the last line that are taken from the load test's summary as they are.
SUMMARY_KEYS = ("achieved_rps", "requests", "failed", "ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50")
TABLE_ROWS = (("time to first token", "ttft"), ("inter-token latency", "itl"), ("end to end", "e2e"))
PERCENTILES = ("p50", "p90", "p99")


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "demo",
        help="see it work: an answer, a short load, a table",
        description="Start the server, stream an answer, run a short load, print a table and one JSON line.",
    )
    add_server_flags(parser)
    parser.add_argument("--load-s", type=float, default=LOAD_S, help="length of the load (default: %(default)s)")
    parser.add_argument("--rps", type=float, default=TARGET_RPS, help="requests a second (default: %(default)s)")
    parser.set_defaults(run=run, passes_unknown_flags=True)


def run(args: argparse.Namespace) -> int:
    """0 when every step worked and no request failed, else 1. Raises ConfigError without a load generator."""
    from tritandem_client import TritandemClientError

    if find_spec("tritandem_loadtest") is None:
        refuse_without_loadtest(args)
    from tritandem_loadtest import LoadTestError

    from tritandem.server.front_workers import FrontWorkers
    from tritandem.server.launcher import ServerDied, TritonServer

    say = Narrator()
    options = front_options(args)
    front = FrontWorkers(options, say) if options else None
    server = TritonServer(**server_arguments(args, say))
    say(f"starting Triton; its log: {server.log_path}")
    try:
        server.start()
        server.wait_ready(on_line=lambda line: show_progress(line, say))
        say(f"ready; asking: {QUESTION}")
        answer = stream_answer(server.grpc_url)
        if front:
            front.start(server.options, server.log_path, server.cpus)
            print(openai_answer(front.options.base_url(server.options), front.options.models[0], say), flush=True)
        say(f"load: {args.rps:g} requests/s for {args.load_s:g} s")
        summary = run_load(server.grpc_url, args.rps, args.load_s, say)
        say("stopping the server")
        if front:
            front.drain()
        exit_code = server.stop()
    except (ServerDied, TritandemClientError, LoadTestError, OSError) as error:
        say(f"failed: {error}")
        return EXIT_FAILED
    finally:
        if front:
            front.kill()
        server.kill()
    # What a larger model of the user's answers is not known here.
    expected_word = EXPECTED_WORD if args.model == DEFAULT_MODEL else ""
    problems = complaints(answer, expected_word, args.rps, summary, exit_code)
    for problem in problems:
        say(f"failed: {problem}")
    print(table(summary))
    print(json.dumps(last_line(answer, args.rps, summary)), flush=True)
    return EXIT_FAILED if problems else EXIT_OK


def refuse_without_loadtest(args: argparse.Namespace) -> NoReturn:
    """Raises ConfigError: the load generator is a distribution of its own, which not every server needs."""
    raise ConfigError(
        "the load generator is not installed: `pip install tritandem-loadtest` brings it "
        "(from a checkout: pip install -c constraints.txt ./client ./loadtest)"
    )


def stream_answer(grpc_url: str) -> str:
    """Print the answer to the question as its tokens arrive; the whole of it."""
    from tritandem_client import Client

    with Client(grpc_url) as client:
        stream = client.chat_stream([{"role": "user", "content": QUESTION}], max_tokens=ANSWER_TOKENS)
        for chunk in stream:
            print(chunk.text, end="", flush=True)
        print()
        return stream.result.text


def openai_answer(base_url: str, model: str, say: Callable[[str], None]) -> str:
    """The answer to the question by the OpenAI API; says how to ask it by hand."""
    body = {"model": model, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": ANSWER_TOKENS}
    text = json.dumps({**body, "temperature": 0})
    say(f"the same by OpenAI's API: curl {base_url}/chat/completions -d '{text}'")
    unverified = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # by an address that no certificate names
    unverified.check_hostname, unverified.verify_mode = False, ssl.CERT_NONE
    url = f"{base_url}/chat/completions"
    with urllib.request.urlopen(url, text.encode(), timeout=60, context=unverified) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def run_load(grpc_url: str, rps: float, duration_s: float, say: Callable[[str], None]) -> dict[str, Any]:
    """The summary of an open-loop Locust run."""
    from tritandem_loadtest import RunConfig, run

    config = RunConfig(url=grpc_url, rps=rps, duration_s=duration_s, output_tokens=LOAD_OUTPUT_TOKENS)
    told_at = time.monotonic()

    def tell(at_s: float, counts: dict[str, int]) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= PROGRESS_EVERY_S:
            told_at = time.monotonic()
            say(f"sent {counts['sent']}, answered {counts['done']}, failed {counts['failed']}")

    report = run(config, tell)
    for reason in report.reasons:
        say(f"the load differed from the one asked for: {reason}")
    return report.summary


def table(summary: dict[str, Any]) -> str:
    """Counts and rate, then a row of percentiles in milliseconds per latency."""
    lines = [
        f"sent {summary['requests']}   failed {summary['failed']}   rate {summary['achieved_rps']:g}/s",
        f"{'milliseconds':<22}" + "".join(f"{name:>10}" for name in PERCENTILES),
    ]
    for title, metric in TABLE_ROWS:
        figures = [summary.get(f"{metric}_ms_{name}") for name in PERCENTILES]
        lines.append(f"{title:<22}" + "".join("         -" if f is None else f"{f:>10.1f}" for f in figures))
    return "\n".join(lines)


def last_line(answer: str, target_rps: float, summary: dict[str, Any]) -> dict[str, Any]:
    """The document that a script reads; figures that nothing was measured for are null."""
    return {"answer": answer, "target_rps": target_rps, **{key: summary.get(key) for key in SUMMARY_KEYS}}


def complaints(
    answer: str, expected_word: str, target_rps: float, summary: dict[str, Any], exit_code: int
) -> list[str]:
    """What makes the demo a failure; empty when all is well."""
    found = []
    if not answer or expected_word not in answer:
        found.append(f"the answer {answer!r} does not name {expected_word}" if expected_word else "no answer")
    if summary["failed"]:
        found.append(f"{summary['failed']} of {summary['requests']} requests failed: {summary['failures']}")
    if abs(summary["achieved_rps"] - target_rps) > RATE_TOLERANCE * target_rps:
        found.append(f"reached {summary['achieved_rps']:g} requests/s instead of {target_rps:g}")
    if exit_code:
        found.append(f"the server ended with exit code {exit_code}")
    return found


def show_progress(line: str, say: Callable[[str], None]) -> None:
    if text := progress(line):
        say(text)
