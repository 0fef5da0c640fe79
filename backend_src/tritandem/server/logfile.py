"""Reads the server's log while it is written: new lines, progress of loading, and why a start failed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path

from .guardian import DRAINED

# I1129 13:24:01.123456 1234 model_lifecycle.cc:849] "successfully loaded 'engine'"
_LINE = re.compile(r"^([IWEF])\d{4} [\d:.]+ \d+ ([\w.]+):\d+\] (.*)$")
_LOADED = re.compile(r"successfully loaded '([^']+)'")
_LOADING = re.compile(r"^\"?loading: ([^\"\s]+?)(?::\d+)?\"?$")
_FAILED = re.compile(r"failed to load '([^']+)' version \d+: (.*)")
_EMPTY = {"", '"'}
# getopt's words, before pages of help.
_USAGE = re.compile(r"tritonserver: (unrecognized option|option .* requires an argument)")
# Triton's errors about a GPU that the machine does not have; a driver that fails speaks through the engine.
_WITHOUT_GPU = re.compile(r"CudaDriverHelper has not been initialized|CUDA driver version is insufficient")
# What is said once the last running request of a drain has ended: by Triton, which waits for HTTP connections first,
# and by the guardian, which asks the scheduler.
REQUESTS_ENDED = ("All models are stopped, unloading models", DRAINED)


class LogReader:
    """Complete lines that were appended to `path` since the last call; starts at `offset` bytes."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def new_lines(self) -> Iterator[str]:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return
        complete = data.rfind(b"\n") + 1
        self.offset += complete
        yield from data[:complete].decode(errors="replace").splitlines()


def progress(line: str) -> str | None:
    """What a person waiting for the server wants to know of this log line; None: nothing."""
    match = _LINE.match(line)
    if not match:
        return None
    level, source, text = match.groups()
    if level in "EF":
        return None if _WITHOUT_GPU.search(text) else text.strip('"')
    if loaded := _LOADED.search(text):
        return f"{loaded[1]} is loaded"
    if loading := _LOADING.match(text):
        return f"loading {loading[1]}"
    # What the models say themselves, through Triton's logger.
    return text.strip('"') if source.endswith(".py") else None


def describe_end(exit_code: int, log: str) -> str:
    """How a server ended by itself; codes above 128 are signals, about which the log knows nothing."""
    if exit_code > 128:
        return f"tritonserver was ended by {signal.Signals(exit_code - 128).name}"
    return f"tritonserver ended with exit code {exit_code}: {explain_failure(log)}"


def explain_failure(log: str) -> str:
    """One line out of a failed server's log: the first model that failed to load with its reason, else the last
    error, else the last line."""
    errors = []
    for line in log.splitlines():
        match = _LINE.match(line)
        text = match[3].strip('"') if match else line
        if failed := _FAILED.search(text):
            return f"model {failed[1]}: {failed[2].strip()}"
        if (match and match[1] in "EF") or line.startswith(("error:", "cannot execute")) or _USAGE.search(line):
            errors.append(text.strip())
    if errors:
        return errors[0]
    lines = [line for line in log.splitlines() if line.strip() not in _EMPTY]
    return lines[-1] if lines else "the log is empty"
