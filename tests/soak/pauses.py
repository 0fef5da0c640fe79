"""How long the soak's own event loop stood still: what its clients saw late was not the server's delay then."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import threading
import time

LOOK_EVERY_S = 0.5
TELL_FROM_S = 10.0


class Pauses:
    """`with` on the loop. `longest_s` so far; the stacks of every thread are printed when one takes TELL_FROM_S."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._beaten_s = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Pauses:
        self._loop = asyncio.get_running_loop()
        self._beaten_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        told = False
        while not self._over.wait(LOOK_EVERY_S):
            silent_s = time.monotonic() - self._beaten_s
            self.longest_s = max(self.longest_s, silent_s - LOOK_EVERY_S)
            if silent_s < TELL_FROM_S:
                told = False
                self._loop.call_soon_threadsafe(self._beat)
            elif not told:
                told = True
                print(f"soak: the clients' event loop stands still for {silent_s:.0f} s", file=sys.stderr, flush=True)
                faulthandler.dump_traceback(sys.stderr)

    def _beat(self) -> None:
        self._beaten_s = time.monotonic()
