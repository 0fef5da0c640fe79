"""A process that finds out whether grammars can be compiled: hostile ones make the compiler run for minutes, take all
memory or overflow its stack, and nothing stops native code but the end of its process.

Owns forks of itself, made ahead, in which grammars are tried, and who is tried next: tenants take turns, one at a time
each, and what takes long stands in a line of its own. Ends with its standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import sys
from dataclasses import dataclass

from ..contracts import error_codec
from ..contracts.errors import ConfigError, InvalidRequest, Saturated, TritandemError
from ..contracts.grammars import Grammar
from ..machine.processes import end_with_parent
from .compiled import ALLOWED
from .trial import read_message, try_grammars, write_message
from .turns import Turns
from .vocabulary import Vocabulary

AT_ONCE = 2  # trials, of two tenants
FORKS = AT_ONCE + 2  # one that takes long beside them, and one ahead, so that a trial does not wait for a fork
QUICK_S = 0.1  # of work; the usual grammar takes 3 ms. Who needs longer begins again, in the other line
MOST_LONG = 8  # in that line
MOST_LONG_OF_ONE = 4  # tenant
NICENESS, LONG_NICENESS = 5, 10  # who decodes goes first, and long trials last


@dataclass(frozen=True, slots=True)
class _Trial:
    number: int
    field: str
    text: str  # of the grammar, as it travels
    tenant: str
    is_long: bool = False


@dataclass(slots=True)
class _Fork:
    process: int
    asks: int  # the pipe to it
    trial: _Trial | None = None


class _Server:
    """`seconds` of work and `memory_bytes`: of one trial."""

    def __init__(self, vocabulary: Vocabulary | ConfigError, seconds: float, memory_bytes: int) -> None:
        self._vocabulary, self._seconds, self._memory_bytes = vocabulary, seconds, memory_bytes
        self._waiting: Turns[_Trial] = Turns()
        self._long: Turns[_Trial] = Turns()
        self._events = selectors.DefaultSelector()
        self._forks: dict[int, _Fork] = {}  # by the pipe from it

    def run(self) -> None:
        self._events.register(0, selectors.EVENT_READ)
        while True:
            self._begin()
            while len(self._forks) < FORKS:
                self._fork()
                self._begin()
            for key, _ in self._events.select():
                if key.fd != 0:
                    self._heard(key.fd)
                elif (message := read_message(0)) is None:
                    return
                else:
                    field, text, tenant = json.loads(message[1])
                    self._waiting.put(tenant, _Trial(message[0], field, text, tenant))

    def _begin(self) -> None:
        """What may run now."""
        for fork in self._forks.values():
            if fork.trial is not None:
                continue
            running = [other.trial for other in self._forks.values() if other.trial is not None]
            quick = [trial.tenant for trial in running if not trial.is_long]
            trial = self._waiting.take(but=quick) if len(quick) < AT_ONCE else None
            if trial is None and len(quick) == len(running):
                trial = self._long.take()
            if trial is None:
                return
            fork.trial = trial
            seconds = self._seconds if trial.is_long else min(QUICK_S, self._seconds)
            if trial.is_long:
                with contextlib.suppress(OSError):
                    os.setpriority(os.PRIO_PROCESS, fork.process, LONG_NICENESS)
            with contextlib.suppress(OSError):  # it has ended: who reads from it says so
                write_message(fork.asks, trial.number, json.dumps([seconds, trial.field, trial.text]).encode())

    def _fork(self) -> None:
        asked, asks = os.pipe()
        hears, told = os.pipe()
        process = os.fork()
        if not process:
            status = 1
            with contextlib.suppress(BaseException):
                end_with_parent()  # though a trial runs, which hears of nothing
                nothing = os.open(os.devnull, os.O_RDWR)
                for ours in (0, 1):
                    os.dup2(nothing, ours)
                for ours in (asks, hears, *self._forks, *(fork.asks for fork in self._forks.values())):
                    os.close(ours)  # so that each end is seen by the other side
                try_grammars(self._vocabulary, asked, told, self._memory_bytes)
                status = 0
            os._exit(status)
        os.close(asked)
        os.close(told)
        self._forks[hears] = _Fork(process, asks)
        self._events.register(hears, selectors.EVENT_READ)

    def _heard(self, hears: int) -> None:
        fork = self._forks[hears]
        trial, fork.trial = fork.trial, None
        message = read_message(hears)
        goes_on = False
        if message is not None:
            error, goes_on = json.loads(message[1])
            write_message(1, message[0], json.dumps(error).encode())
            goes_on = goes_on and trial is not None and not trial.is_long  # which has a low priority for good
            trial = None
        if goes_on:
            return
        self._events.unregister(hears)
        del self._forks[hears]
        os.close(hears)
        os.close(fork.asks)
        _, status = os.waitpid(fork.process, 0)  # who has answered takes some ms to end
        if trial is not None:
            self._ended(trial, os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF)

    def _ended(self, trial: _Trial, too_long: bool) -> None:
        """The fork has, before an answer."""
        if too_long and not trial.is_long and self._seconds > QUICK_S:
            if len(self._long) < MOST_LONG and self._long.held(trial.tenant) < MOST_LONG_OF_ONE:
                again = _Trial(trial.number, trial.field, trial.text, trial.tenant, is_long=True)
                self._long.put(trial.tenant, again)
                return
            reason = f"{trial.field}: {len(self._long)} grammars that take more than {QUICK_S:g} s are being tried"
            refused: TritandemError = Saturated(reason, len(self._long) * self._seconds)
        else:
            bounds = f"{self._seconds:g} s and {self._memory_bytes >> 20} MiB"
            text = Grammar.from_bytes(trial.text.encode()).text
            refused = InvalidRequest(trial.field, text, f"{ALLOWED}: {bounds}")
        write_message(1, trial.number, json.dumps(error_codec.pack(refused)).encode())


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
