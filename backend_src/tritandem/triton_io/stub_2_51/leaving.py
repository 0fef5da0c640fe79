"""The end of a model's process, without taking its interpreter apart.

With torch loaded that is most of what a stop takes, and Triton waits for it. All that a model has to do at its end was
done in `finalize`; the rest is memory that the kernel takes back.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

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
