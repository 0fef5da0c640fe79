"""Progress for a person: one line each on standard error, with the seconds since the command began."""

from __future__ import annotations

import sys
import time


class Narrator:
    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        elapsed_s = time.monotonic() - self._began
        print(f"[{elapsed_s:7.1f} s] {text}", file=sys.stderr, flush=True)
