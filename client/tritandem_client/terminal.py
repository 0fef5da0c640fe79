"""Answers on a terminal: token by token, as JSON, with statistics; and the conversation of `chat`.

Owns what is printed where: answers on standard output, everything else on standard error. Knows nothing
about options or exit codes. Ctrl-C ends the running answer, not the conversation.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Iterator

from tritandem_client.client import Client
from tritandem_client.errors import ConnectionFailed, ServerNotReady, TritandemClientError
from tritandem_client.request import Options
from tritandem_client.results import Result
from tritandem_client.stream import Stream


def show(stream: Stream, *, as_json: bool, stats: bool) -> Result:
    """Print an answer while it comes. Ctrl-C cancels it and gives what there was. Raises the stream's errors."""
    with stream, contextlib.suppress(KeyboardInterrupt), _interrupted_by_closing(stream):
        if as_json:
            stream.drain()
        else:
            _print_text(stream)
    if as_json:
        print(json.dumps(stream.result.to_dict(), ensure_ascii=False), flush=True)
    if stats:
        print(statistics_line(stream.result), file=sys.stderr, flush=True)
    return stream.result


@contextlib.contextmanager
def _interrupted_by_closing(stream: Stream) -> Iterator[None]:
    """The first Ctrl-C closes the stream, whose iteration ends then; a second one raises. An exception may strike
    inside gRPC, with a lock taken that is never given back: closing the channel would wait for that lock."""
    closed = False

    def close(*_: object) -> None:
        nonlocal closed
        if closed:
            raise KeyboardInterrupt
        closed = True
        stream.close()

    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # somebody else's, or ignored
        yield
        return
    signal.signal(signal.SIGINT, close)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _print_text(stream: Stream) -> None:
    """What comes after it begins on a line of its own, however the answer ends."""
    try:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    finally:
        if stream.text and not stream.text.endswith("\n"):
            print(flush=True)


def statistics_line(result: Result) -> str:
    timings = result.timings
    return (
        f"[{result.outcome.lower()}, {result.finish_reason}; {result.num_input_tokens} tokens in "
        f"({result.cached_tokens} cached), {result.num_output_tokens} out; TTFT {timings.ttft_s * 1e3:.0f} ms, "
        f"{timings.tokens_per_s:.1f} tokens/s, {timings.total_s:.2f} s in all]"
    )


def describe(error: TritandemClientError) -> str:
    """One line for people: which kind of failure, its message, and what to do about it where that is plain."""
    word = getattr(error, "outcome", None) or type(error).__name__
    advice = "; is a server running there? --url HOST:PORT names another" if isinstance(error, ConnectionFailed) else ""
    return f"{word}: {error}{advice}"


class Chat:
    """A conversation with its history; lines come from standard input."""

    def __init__(self, client: Client, options: Options, *, system: str | None, as_json: bool, stats: bool) -> None:
        self._client, self._options = client, options
        self._system, self._as_json, self._stats = system, as_json, stats
        self._turns: list[dict[str, str]] = []

    def run(self) -> bool:
        """Until /exit or the end of input. False when the last answer failed because the server was out of reach."""
        interactive = sys.stdin.isatty()
        if interactive:
            with contextlib.suppress(ImportError):  # line editing, where the platform has it
                import readline  # noqa: F401
            print("/exit or Ctrl-D ends, /reset forgets, /system TEXT sets the system message", file=sys.stderr)
        reached = True
        while True:
            try:
                line = input("> " if interactive else "").strip()
            except EOFError:
                if interactive:
                    print(file=sys.stderr)
                return reached
            except KeyboardInterrupt:  # at the prompt: drop the line
                print(file=sys.stderr)
                continue
            if line == "/exit":
                return reached
            if line.startswith("/"):
                self._command(line)
            elif line:
                reached = self._answer(line)

    def _command(self, line: str) -> None:
        word, _, rest = line.partition(" ")
        if word == "/reset":
            self._turns.clear()
            print("the conversation starts anew", file=sys.stderr)
        elif word == "/system":
            self._system = rest.strip() or None
            print("system message " + ("set" if self._system else "removed"), file=sys.stderr)
        else:
            print(f"unknown command {word}; there are /reset, /system TEXT, /exit", file=sys.stderr)

    def _answer(self, line: str) -> bool:
        """One turn. A turn that failed leaves the history as it was; a broken-off one keeps what was said."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        turns = [*self._turns, {"role": "user", "content": line}]
        try:
            stream = self._client.chat_stream([*system, *turns], **self._options)
            result = show(stream, as_json=self._as_json, stats=self._stats)
        except TritandemClientError as error:
            print(f"error: {describe(error)}", file=sys.stderr)
            return not isinstance(error, (ConnectionFailed, ServerNotReady))
        if result.text:
            self._turns = [*turns, {"role": "assistant", "content": result.text}]
        return True
