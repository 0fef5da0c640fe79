"""A process that finds out whether grammars can be compiled: hostile ones make the compiler run for minutes, take all
memory or overflow its stack, and nothing stops native code but the end of its process.

Each grammar is tried in a fork of its own, which the kernel ends when its time or memory is over. Speaks in messages
over its two pipes: int64 number, uint32 length, JSON. Ends with its standard input; knows nothing about who asks.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import signal
import struct
import sys
from collections import deque

import numpy as np

from ..contracts import error_codec
from ..contracts.errors import ConfigError, EngineFailed, InvalidRequest
from ..contracts.grammars import Grammar
from .compiled import ALLOWED, Matcher, compile_grammar
from .vocabulary import Vocabulary

HEAD = struct.Struct("<qI")
AT_ONCE = 2  # forks
STEPS = 3  # of an answer that is tried: what grows too wide does so at its beginning
NICENESS = 5  # who decodes goes first


def read_message(stream: int) -> tuple[int, bytes] | None:
    """None at the end."""
    head = _read(stream, HEAD.size)
    if head is None:
        return None
    number, length = HEAD.unpack(head)
    body = _read(stream, length)
    return None if body is None else (number, body)


def write_message(stream: int, number: int, body: bytes) -> None:
    data = memoryview(HEAD.pack(number, len(body)) + body)
    while data:
        data = data[os.write(stream, data) :]


def _read(stream: int, length: int) -> bytes | None:
    parts = []
    while length:
        part = os.read(stream, min(length, 1 << 20))
        if not part:
            return None
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def attempt(vocabulary: Vocabulary | ConfigError, grammar: Grammar, field: str) -> InvalidRequest | None:
    """Why a grammar is refused: it cannot be compiled, or followed for a few tokens, or there is no vocabulary."""
    if isinstance(vocabulary, ConfigError):
        return InvalidRequest(field, grammar.text, f"nothing: {vocabulary}")
    try:
        matcher = compile_grammar(vocabulary, grammar, field=field)
        _walk(matcher)
    except InvalidRequest as error:
        return error
    except EngineFailed as error:
        return InvalidRequest(field, grammar.text, f"{ALLOWED}: {error}")
    return None


def _walk(matcher: Matcher) -> None:
    """Raises EngineFailed."""
    row = np.zeros(matcher.vocabulary.words, np.int32)
    random = np.random.default_rng(0)
    ends = set(matcher.vocabulary.end_ids)
    for _ in range(STEPS):
        if matcher.is_over():
            return
        matcher.mask_into(row)
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        going_on = [token for token in random.choice(ids, 4).tolist() if token not in ends] if len(ids) else []
        if not going_on:
            return
        for token in matcher.forced_tokens() or going_on[:1]:
            matcher.accept(token)
            matcher.check()


class _Server:
    """`seconds` of work and `memory_bytes`: of one trial."""

    def __init__(self, vocabulary: Vocabulary | ConfigError, seconds: float, memory_bytes: int) -> None:
        self._vocabulary, self._seconds, self._memory_bytes = vocabulary, seconds, memory_bytes
        self._waiting: deque[tuple[int, str, Grammar]] = deque()
        self._events = selectors.DefaultSelector()
        self._running = 0

    def run(self) -> None:
        self._events.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in self._events.select():
                if key.fd != 0:
                    self._finished(key.fd, *key.data)
                elif (message := read_message(0)) is None:
                    return
                else:
                    field, text = json.loads(message[1])
                    self._waiting.append((message[0], field, Grammar.from_bytes(text.encode())))
            while self._waiting and self._running < AT_ONCE:
                self._begin(*self._waiting.popleft())

    def _begin(self, number: int, field: str, grammar: Grammar) -> None:
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            self._try(theirs, number, field, grammar)
        os.close(theirs)
        self._running += 1
        self._events.register(ours, selectors.EVENT_READ, (child, number, field, grammar))

    def _try(self, stream: int, number: int, field: str, grammar: Grammar) -> None:
        """In the fork; never returns."""
        status = 1
        with contextlib.suppress(BaseException):
            signal.setitimer(signal.ITIMER_PROF, self._seconds)  # of its own work: a busy machine refuses nothing
            with open("/proc/self/statm", encoding="ascii") as statm:
                taken = int(statm.read().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + self._memory_bytes,) * 2)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            refused = attempt(self._vocabulary, grammar, field)
            write_message(stream, number, json.dumps(refused and error_codec.pack(refused)).encode())
            status = 0
        os._exit(status)

    def _finished(self, stream: int, child: int, number: int, field: str, grammar: Grammar) -> None:
        message = read_message(stream)
        if message is None:
            bounds = f"{self._seconds:g} s and {self._memory_bytes >> 20} MiB"
            refused = InvalidRequest(field, grammar.text, f"{ALLOWED}: {bounds}")
            message = number, json.dumps(error_codec.pack(refused)).encode()
        write_message(1, *message)
        self._events.unregister(stream)
        os.close(stream)
        os.waitpid(child, 0)  # who has answered takes some ms to end
        self._running -= 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: who asks goes first
    if (first := read_message(0)) is None:
        return
    json_text, rows, end_ids, seconds, memory_bytes = json.loads(first[1])
    os.nice(NICENESS)
    vocabulary: Vocabulary | ConfigError
    try:
        vocabulary = Vocabulary(json_text, rows, end_ids)
    except ConfigError as error:
        vocabulary = error
    _Server(vocabulary, seconds, memory_bytes).run()


if __name__ == "__main__":
    sys.stdout = sys.stderr  # the pipe is for messages alone
    main()
