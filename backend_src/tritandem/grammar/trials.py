"""Grammars tried in a process of their own before anything is done with them, each once: what is known is remembered.

Owns that process and the thread that hears from it. Any thread asks.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future

from ..contracts import error_codec
from ..contracts.errors import EngineFailed, InvalidRequest
from ..contracts.grammars import MAX_BYTES, Grammar, Kind
from .trial import read_message, write_message

SECONDS = 1.0
MEMORY_BYTES = 512 << 20
REMEMBERED = 4096

Answer = Future[None]


class Trials:
    """The parameters are those of `Vocabulary`, which the process builds: nobody else needs one to ask."""

    def __init__(
        self,
        json_text: str,
        rows: int,
        end_ids: Sequence[int],
        seconds: float = SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        remembered: int = REMEMBERED,
    ) -> None:
        self._begin = json.dumps([json_text, rows, list(end_ids), seconds, memory_bytes]).encode()
        self._remembered = remembered
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], Answer] = OrderedDict()
        self._asked: dict[int, Answer] = {}
        self._count = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._closed = False
        self._writing = threading.Lock()
        self._told: subprocess.Popen[bytes] | None = None  # the process that knows the vocabulary

    def start(self) -> None:
        """The process, ahead of the first grammar: it takes a second until it can answer. Returns at once."""
        threading.Thread(target=self.check, args=(Grammar(Kind.JSON_OBJECT), ""), daemon=True).start()

    def check(self, grammar: Grammar, field: str) -> Answer:
        """Done at once for what is known. Its exception: InvalidRequest naming `field`, or EngineFailed."""
        data = grammar.to_bytes()
        if len(data) > MAX_BYTES:
            return _settled(Future(), InvalidRequest(field, f"{len(data)} bytes", f"at most {MAX_BYTES} bytes"))
        key = grammar.key, field
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            answer: Answer = Future()
            try:
                process = self._running()
            except OSError as error:
                return _settled(answer, EngineFailed(f"the grammar could not be tried: {error}"))
            self._known[key] = answer
            if len(self._known) > self._remembered:
                self._known.popitem(last=False)
            self._count += 1
            number = self._count
            self._asked[number] = answer
        self._write(process, number, json.dumps([field, data.decode()]).encode())
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
            words = [sys.executable or "python3", "-m", "tritandem.grammar.trial"]
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
                number, body = message
                with self._lock:
                    answer = self._asked.pop(number)
                said = json.loads(body)
                _settled(answer, said and error_codec.unpack(said))
        process.kill()
        process.wait()
        with self._writing, contextlib.suppress(OSError):  # whatever was half written
            process.__exit__(None, None, None)
        with self._lock:
            self._process = None
            lost, self._asked = self._asked, {}
            for key in [key for key, answer in self._known.items() if not answer.done()]:
                del self._known[key]
        for answer in lost.values():
            _settled(answer, EngineFailed("the grammar could not be tried: its process has ended"))


def _settled(answer: Answer, error: Exception | None) -> Answer:
    if error is None:
        answer.set_result(None)
    else:
        answer.set_exception(error)
    return answer
