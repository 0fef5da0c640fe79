"""Grammars tried in a process of their own before anything is done with them, each once: what is known is remembered.

Owns that process and the thread that hears from it. Any thread asks.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from ..contracts import error_codec
from ..contracts.errors import EngineFailed, InvalidRequest
from ..contracts.grammars import MAX_BYTES, Grammar, Kind
from .trial import read_message, write_message

SECONDS = 1.0
MEMORY_BYTES = 512 << 20
REMEMBERED = 4096

Answer = Future[None]


class _Asked(NamedTuple):
    answer: Answer
    key: tuple[str, str]  # of the grammar, and the field
    tenant: str
    begun_ns: int


class Trials:
    """The parameters are those of `Vocabulary`, which the process builds: nobody else needs one to ask. `note` hears
    how many ns each trial took, the wait for its turn included."""

    def __init__(
        self,
        json_text: str,
        rows: int,
        end_ids: Sequence[int],
        seconds: float = SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        remembered: int = REMEMBERED,
        note: Callable[[int], None] | None = None,
    ) -> None:
        self._begin = json.dumps([json_text, rows, list(end_ids), seconds, memory_bytes]).encode()
        self._remembered, self._note = remembered, note
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], Answer] = OrderedDict()
        self._asked: dict[int, _Asked] = {}
        self._same: dict[
            tuple[tuple[str, str], str], Answer
        ] = {}  # of what is asked: for whoever of its tenant asks too
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._closed = False
        self._writing = threading.Lock()
        self._told: subprocess.Popen[bytes] | None = None  # the process that knows the vocabulary

    def start(self) -> None:
        """The process, ahead of the first grammar: it takes a second until it can answer. Returns at once."""
        threading.Thread(target=self.check, args=(Grammar(Kind.JSON_OBJECT), ""), daemon=True).start()

    def check(self, grammar: Grammar, field: str, tenant: str = "") -> Answer:
        """Done at once for what is known. Its exception: InvalidRequest naming `field`, Saturated where too many that
        take long are being tried, or EngineFailed. Tenants take turns."""
        data = grammar.to_bytes()
        if len(data) > MAX_BYTES:
            return _settled(Future(), InvalidRequest(field, f"{len(data)} bytes", f"at most {MAX_BYTES} bytes"))
        key = grammar.key, field
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            if (same := self._same.get((key, tenant))) is not None:
                return same
            answer: Answer = Future()
            try:
                process = self._running()
            except OSError as error:
                return _settled(answer, EngineFailed(f"the grammar could not be tried: {error}"))
            self._same[key, tenant] = answer
            self._count += 1
            number = self._count
            self._asked[number] = _Asked(answer, key, tenant, time.monotonic_ns())
        self._write(process, number, json.dumps([field, data.decode(), tenant]).encode())
        return answer

    def close(self) -> None:
        """What is asked ends as failed; no thread and no process is left."""
        with self._lock:
            self._closed = True
            process, reader = self._process, self._reader
        if process is not None and reader is not None:
            process.kill()
            reader.join()

    def _running(self) -> subprocess.Popen[bytes]:
        """With the lock. Raises OSError."""
        if self._closed:
            raise OSError("closed")
        if self._process is None:
            # In Triton's stub, too, this is the python3 whose packages are in use: the first on PATH.
            words = [sys.executable or "python3", "-m", "tritandem.grammar.trial_server"]
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._reader = threading.Thread(
                target=self._read, args=(self._process,), name="grammar-trials", daemon=True
            )
            self._reader.start()
        return self._process

    def _write(self, process: subprocess.Popen[bytes], number: int, body: bytes) -> None:
        """To a process that has ended nothing can be written; who reads from it says so."""
        assert process.stdin is not None
        with self._writing, contextlib.suppress(OSError):
            if self._told is not process:
                write_message(process.stdin.fileno(), 0, self._begin)
                self._told = process
            write_message(process.stdin.fileno(), number, body)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with contextlib.suppress(OSError):
            while (message := read_message(process.stdout.fileno())) is not None:
                said = json.loads(message[1])
                self._told_of(message[0], said and error_codec.unpack(said))
        process.kill()
        process.wait()
        with self._writing, contextlib.suppress(OSError):  # whatever was half written
            process.__exit__(None, None, None)
        with self._lock:
            self._process = None
            lost, self._asked = self._asked, {}
            self._same.clear()
        for asked in lost.values():
            _settled(asked.answer, EngineFailed("the grammar could not be tried: its process has ended"))

    def _told_of(self, number: int, error: Exception | None) -> None:
        with self._lock:
            asked = self._asked.pop(number)
            del self._same[asked.key, asked.tenant]
            if error is None or isinstance(error, InvalidRequest):  # the grammar's own fault, not the moment's
                self._known[asked.key] = asked.answer
                if len(self._known) > self._remembered:
                    self._known.popitem(last=False)
        if self._note is not None:
            self._note(time.monotonic_ns() - asked.begun_ns)
        _settled(asked.answer, error)


def _settled(answer: Answer, error: Exception | None) -> Answer:
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)
    return answer
