"""The mark of a run: what bears it in /dev/shm or on a command line, and the folder that it names, are that run's.

The launcher and its guardian hold a lock on a file of that mark; the kernel lets go of it when both have ended, however
they ended. What lies under a lock that nobody holds is removed by the next start; a run that lives is left alone.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .guardian import FOLDER_PREFIX, LOCK, SHM_FOLDER, remove_traces

_LOCK_FILE = re.compile(rf"(tritandem_[0-9a-f]{{12}}_){LOCK}")


@dataclass(frozen=True, slots=True)
class Run:
    """`mark` begins the names of this run's files in /dev/shm; `lock` is an open descriptor."""

    mark: str
    folder: Path
    lock: int

    def end(self) -> None:
        """Nothing is left afterwards, whoever was killed before. To be called once, after the guardian has ended."""
        remove_traces(self.mark)
        os.close(self.lock)

    def keep_private(self) -> None:
        """Tensors pass through regions that Triton makes readable for everybody."""
        for path in Path(SHM_FOLDER).glob(f"{self.mark}*"):
            with suppress(OSError):  # it has just gone, or somebody has put a link there
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
                try:
                    os.fchmod(file, 0o600)
                finally:
                    os.close(file)


def claim() -> Run:
    """A mark that nobody else has, and its empty folder. Raises OSError."""
    while True:
        mark = f"tritandem_{secrets.token_hex(6)}_"
        lock = os.open(f"{SHM_FOLDER}/{mark}{LOCK}", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if _is_ours(lock):
                folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX))
                try:
                    os.write(lock, os.fsencode(folder))
                except OSError:
                    shutil.rmtree(folder)
                    raise
                return Run(mark, folder, lock)
        except BaseException:
            remove_traces(mark)
            os.close(lock)
            raise
        os.close(lock)  # another start took it for a dead run's, between its making and its locking


def remove_dead_runs() -> list[str]:
    """The marks of this user's runs that had left something behind; nothing of it is left now."""
    removed: list[str] = []
    if not os.path.isdir(SHM_FOLDER):
        return removed
    for name in sorted(os.listdir(SHM_FOLDER)):
        if not (found := _LOCK_FILE.fullmatch(name)):
            continue
        try:
            lock = os.open(f"{SHM_FOLDER}/{name}", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # another user's, or it has just ended
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid() and _is_ours(lock):
                remove_traces(found[1])
                removed.append(found[1])
        finally:
            os.close(lock)
    return removed


def _is_ours(lock: int) -> bool:
    """Takes the lock; False when somebody else holds it, or has removed the file."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(lock).st_nlink > 0
