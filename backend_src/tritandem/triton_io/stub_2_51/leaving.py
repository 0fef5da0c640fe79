"""The end of a model's process, without taking its interpreter apart.

With torch loaded that is most of what a stop takes, and Triton waits for it. All that a model has to do at its end was
done in `finalize`; the rest is memory that the kernel takes back.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

BROKEN = 1  # the exit code
TAKING_S, SENDING_S = 1.0, 0.2  # for the last messages to be taken, and to arrive
STUB_NAME = "triton_python_backend_stub"


def leave_without_teardown() -> None:
    """To be called before anything is imported that has an exit handler: handlers run in reverse order, and this one
    ends the process. Does nothing outside Triton's stub, where an exit code would be lost."""
    if Path("/proc/self/exe").readlink().name == STUB_NAME:
        atexit.register(_leave)


def _leave() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def leave_broken(taken: Callable[[], bool]) -> None:
    """End the process of a model that is broken for good, so that the server is replaced, once its last messages are
    `taken`. Returns at once."""

    def leave() -> None:
        until = time.monotonic() + TAKING_S
        while not taken() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(SENDING_S)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(BROKEN)

    threading.Thread(target=leave, name="leaving", daemon=True).start()
