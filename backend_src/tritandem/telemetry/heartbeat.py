"""What a model's process says about its own life, for whoever watches it from outside.

One thread writes a line into a file twice a second: a count, and what has been going on for too long, if anything has.
A process that is stopped, or whose interpreter is held, writes nothing. The thread also ends a process whose server has
gone. Work that is watched costs two dictionary writes; without a file, all that happens is the look at the parent.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ..machine.processes import ProcessWatch

PERIOD_S = 0.5
LINE_BYTES = 256


class Busy:
    """`with busy: ...` around work that ends within `limit_s` seconds unless it hangs. Any number of threads, each at
    one thing of this kind at a time."""

    def __init__(self, what: str, limit_s: float) -> None:
        self.what, self.limit_s = what, limit_s
        self._since_ns: dict[int, int] = {}  # by thread

    def __enter__(self) -> None:
        self._since_ns[threading.get_ident()] = time.monotonic_ns()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._since_ns[threading.get_ident()]

    def oldest_ns(self) -> int | None:
        """When the work began that has gone on for longest; None: nothing is going on."""
        return min(list(self._since_ns.values()), default=None)


class HangWatch:
    """What hangs: work that outlasts its limit, without the time in which this process waited for a core.

    Called by one thread, once a period. `waited_s` gives the seconds that the process's threads have waited so far.
    """

    def __init__(self, waited_s: Callable[[], float]) -> None:
        self._waited_s = waited_s
        self._kinds: list[Busy] = []
        self._going_on: dict[Busy, tuple[int, float]] = {}  # since when, and seconds that count
        self._looked: tuple[float, float] | None = None  # at, waited until then; None: nothing was going on

    def add(self, kind: Busy) -> None:
        self._kinds.append(kind)

    def look(self, now_s: float) -> str:
        """What hangs, in words; "" is good news."""
        oldest = {kind: since for kind in self._kinds if (since := kind.oldest_ns()) is not None}
        # The same as at the last look: whatever is younger than a period is none of our business.
        same = [kind for kind, since in oldest.items() if self._going_on.get(kind, (0, 0.0))[0] == since]
        passed_s = self._passed_s(now_s) if same else self._forget()
        going_on = {kind: (since, 0.0) for kind, since in oldest.items()}
        for kind in same:
            going_on[kind] = (oldest[kind], self._going_on[kind][1] + passed_s)
        self._going_on = going_on
        hanging = [kind for kind in same if going_on[kind][1] > kind.limit_s]
        return ", ".join(f"{kind.what} has taken more than {kind.limit_s:g} s" for kind in hanging)

    def _passed_s(self, now_s: float) -> float:
        waited_s = self._waited_s()
        then_s, waited_then_s = self._looked or (now_s, waited_s)
        self._looked = now_s, waited_s
        # A thread that sleeps through its alarm says that the machine stood still, not that the others hang.
        return max(0.0, min(now_s - then_s, 2 * PERIOD_S) - (waited_s - waited_then_s))

    def _forget(self) -> float:
        self._looked = None
        return 0.0


class Heartbeat:
    """Starts with this object and beats until the process ends. `path`: the file; None: nobody watches."""

    def __init__(self, path: Path | None) -> None:
        self._parent = os.getppid()
        self._beats = 0
        process = ProcessWatch()
        self._watch = HangWatch(lambda: process.waited_s() or 0.0)
        self._path = path
        # Never closed: the last beat comes with the end of the process.
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def busy(self, what: str, limit_s: float) -> Busy:
        """A kind of work that is watched from now on."""
        kind = Busy(what, limit_s)
        if self._file is not None:
            self._watch.add(kind)
        return kind

    def _run(self) -> None:
        pause = threading.Event()
        while os.getppid() == self._parent:
            self._beat()
            pause.wait(PERIOD_S)
        # Its requests died with the server, and an orderly end would wait for answers of that server for ever.
        os.kill(os.getpid(), signal.SIGKILL)

    def _beat(self) -> None:
        if self._file is None or self._path is None:
            return
        try:
            os.pwrite(self._file, self._line(), 0)
        except OSError:  # a full disk: better not watched than taken for silent
            self._file = None
            with suppress(OSError):
                self._path.unlink()

    def _line(self) -> bytes:
        self._beats += 1
        text = f"{self._beats} {self._watch.look(time.monotonic())}"
        return text.encode()[: LINE_BYTES - 1].ljust(LINE_BYTES - 1) + b"\n"


def read_heartbeat(path: Path) -> tuple[int, str] | None:
    """(beats so far, what hangs) of the process that writes `path`; None: it has not begun."""
    try:
        count, _, what = path.read_text(errors="replace").partition(" ")
        return int(count), what.strip()
    except (OSError, ValueError):
        return None
