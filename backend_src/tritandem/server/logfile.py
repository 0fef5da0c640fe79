"""The server's log: where it lies, how long it may get, and what is read off it while it is written."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from ..host import cache_root

# In the cache folder, over all servers.
KEPT_LOGS, KEPT_LOG_BYTES = 20, 1 << 30

# I1129 13:24:01.123456 1234 model_lifecycle.cc:849] "successfully loaded 'engine'"
_LINE = re.compile(r"^([IWEF])\d{4} [\d:.]+ \d+ ([\w.]+):\d+\] (.*)$")
_LOADED = re.compile(r"successfully loaded '([^']+)'")
_LOADING = re.compile(r"^\"?loading: ([^\"\s]+?)(?::\d+)?\"?$")
_FAILED = re.compile(r"failed to load '([^']+)' version \d+: (.*)")
# A model that fails is reported twice, with Python's stack; `describe_end` says it once, when the server has ended.
_SAID_AT_THE_END = re.compile(r"Failed to create instance: |failed to load '")
_STACK = r"\n\nAt:\n"  # as Triton quotes it
_EMPTY = {"", '"'}
# getopt's words, before pages of help.
_USAGE = re.compile(r"tritonserver: (unrecognized option|option .* requires an argument)")
# Triton's errors about a GPU that the machine does not have; a driver that fails speaks through the engine.
_WITHOUT_GPU = re.compile(r"CudaDriverHelper has not been initialized|CUDA driver version is insufficient")
# What Triton says once the last running request has ended and no HTTP connection is left.
STOPPED = "All models are stopped, unloading models"


def new_log_path() -> Path:
    """A file for one more server's log in the cache folder; of the older ones only the newest are kept."""
    folder = cache_root() / "logs"
    kept_bytes, old = 0, []
    for path in folder.glob("triton-*.log*"):
        with suppress(FileNotFoundError):  # another server that starts has removed it meanwhile
            found = path.stat()
            old.append((found.st_mtime, found.st_size, path))
    for number, (_, size, path) in enumerate(sorted(old, reverse=True), start=1):
        kept_bytes += size
        if number >= KEPT_LOGS or kept_bytes > KEPT_LOG_BYTES:
            path.unlink(missing_ok=True)
    return folder / f"triton-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(2)}.log"


def open_log(path: Path) -> BinaryIO:
    """To append to: whoever cuts it off, the server goes on at its end. For this user only. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))


def start_afresh(path: Path, max_bytes: int) -> bool:
    """Whether the log was longer than `max_bytes`: then it begins anew, and what it held is PATH.1. On a full disk the
    past is given up."""
    try:
        if path.stat().st_size <= max_bytes:
            return False
        with suppress(OSError):
            shutil.copy(path, f"{path}.1")
        os.truncate(path, 0)
    except OSError:
        return False
    return True


class LogReader:
    """Complete lines that were appended to `path` since the last call; starts at `offset` bytes, or anew with the
    file."""

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path, self.offset = path, offset

    def new_lines(self) -> Iterator[str]:
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self.offset:
                    self.offset = 0
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
        return None if _WITHOUT_GPU.search(text) or _SAID_AT_THE_END.search(text) else text.strip('"')
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
            return f"model {failed[1]}: {failed[2].partition(_STACK)[0].strip()}"
        if (match and match[1] in "EF") or line.startswith(("error:", "cannot execute")) or _USAGE.search(line):
            errors.append(text.strip())
    if errors:
        return errors[0]
    lines = [line for line in log.splitlines() if line.strip() not in _EMPTY]
    return lines[-1] if lines else "the log is empty"
