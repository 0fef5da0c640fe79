"""One grammar tried: compiled, and followed for a few tokens, within bounds of work and memory that only the end of the
process keeps. Owns the messages of trials: int64 number, uint32 length, JSON. Knows nothing about who asks.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import struct

import numpy as np

from ..contracts import error_codec
from ..contracts.errors import ConfigError, EngineFailed, InvalidRequest
from ..contracts.grammars import Grammar, Kind
from .compiled import ALLOWED, Matcher, compile_grammar
from .vocabulary import Vocabulary

HEAD = struct.Struct("<qI")
STEPS = 3  # of an answer that is tried: what grows too wide does so at its beginning
KEPT_BYTES = 64 << 20  # a process that has kept so much of its trials makes way for a fresh one


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


def try_grammars(vocabulary: Vocabulary | ConfigError, asked: int, told: int, memory_bytes: int) -> None:
    """Answer each [seconds, field, grammar] read from `asked` with [error or null, whether this process goes on], until
    the end of it, or until a trial may have left something behind. The kernel ends the process, without an answer, when
    a trial works for longer than `seconds` or takes more than `memory_bytes`."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    attempt(vocabulary, Grammar(Kind.JSON_OBJECT), "")  # whatever the first one makes this process own
    begun_bytes = _taken_bytes()
    while (message := read_message(asked)) is not None:
        seconds, field, text = json.loads(message[1])
        resource.setrlimit(resource.RLIMIT_AS, (_taken_bytes() + memory_bytes, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # of its own work: a busy machine refuses nothing
        refused = attempt(vocabulary, Grammar.from_bytes(text.encode()), field)
        signal.setitimer(signal.ITIMER_PROF, 0)
        goes_on = refused is None and _taken_bytes() - begun_bytes < KEPT_BYTES
        write_message(told, message[0], json.dumps([refused and error_codec.pack(refused), goes_on]).encode())
        if not goes_on:
            return


def _taken_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


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
