"""Packages that torch and transformers import anyway and that need neither, imported beside them.

Most of an import is waiting for files: on a disk far away, torch and transformers take ten seconds for theirs.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Sequence
from contextlib import suppress

# Hundreds of modules each; the second one only where it is installed.
PACKAGES = ("sympy", "sklearn.metrics")


def import_beside(packages: Sequence[str] = PACKAGES) -> threading.Thread:
    """Begin; whoever needs one of them waits until it is there. What is missing is left to whoever needs it."""

    def run() -> None:
        for name in packages:
            with suppress(Exception):
                importlib.import_module(name)

    thread = threading.Thread(target=run, name="early-imports", daemon=True)
    thread.start()
    return thread
