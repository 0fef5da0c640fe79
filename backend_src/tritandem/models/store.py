"""The model cache: one folder per model and version of its making, which is either complete or absent.

A folder is built beside its place and renamed into it; whoever builds holds a file lock that the system drops when
the process ends, however it ends. What an interrupted build left behind is removed by the next one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from ..host import Refusal, cache_root

# Written last into every folder: what it was made from, and by what.
RECIPE_FILE = "tritandem.json"
# Raise it when the same source gives other files: what an older version made is then made again, in a folder beside
# it, because a server of that version may still be reading it.
FORMAT = 2
CHUNK_BYTES = 1 << 20
MAKERS = ("tritandem", "transformers", "gguf")
Say = Callable[[str], None]


def models_root() -> Path:
    return cache_root() / "models"


def find(name: str, source_sha256: str, root: Path | None = None) -> Path | None:
    """The complete folder of `name` made from this very source; None when there is none."""
    folder = _folder(root or models_root(), name)
    try:
        made_from = json.loads((folder / RECIPE_FILE).read_text())["source_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return folder if made_from == source_sha256 else None


def build(
    name: str, source_sha256: str, make: Callable[[Path, Path], None], say: Say, root: Path | None = None
) -> Path:
    """The folder of `name`, made by `make(scratch, out)` unless it is there already.

    `scratch` and `out` are empty folders on the cache's file system; what `make` writes to `out` becomes the model.
    Raises Refusal when the cache cannot be written, and whatever `make` raises.
    """
    root = root or models_root()
    if folder := find(name, source_sha256, root):
        return folder
    for older in _older(root, name):
        say(f"{older} was made by an older version and is no longer used: delete it")
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _locked(root / f".{name}.lock", say):
            # Somebody may have built it while we waited for the lock.
            return find(name, source_sha256, root) or _build_locked(root, name, source_sha256, make)
    except OSError as error:
        raise Refusal(
            f"cannot write the model cache {root}: {error.strerror or error}",
            "free some space there, or set XDG_CACHE_HOME to a folder that can be written",
        ) from error


def _build_locked(root: Path, name: str, source_sha256: str, make: Callable[[Path, Path], None]) -> Path:
    work, folder = root / f".{name}.partial", _folder(root, name)
    for leftover in (work, root / f".{name}.old"):
        shutil.rmtree(leftover, ignore_errors=True)
    scratch, out = work / "scratch", work / "out"
    scratch.mkdir(parents=True)
    out.mkdir()
    try:
        make(scratch, out)
        (out / RECIPE_FILE).write_text(json.dumps(_recipe(source_sha256), indent=2) + "\n")
        _flush(out)
        if folder.exists():  # from another source
            os.rename(folder, root / f".{name}.old")
        os.rename(out, folder)
    finally:
        for leftover in (work, root / f".{name}.old"):
            shutil.rmtree(leftover, ignore_errors=True)
    return folder


def _folder(root: Path, name: str) -> Path:
    return root / f"{name}-v{FORMAT}"


def _older(root: Path, name: str) -> list[Path]:
    """Folders of the same model that other versions made: the first of them had no number."""
    numbered = [root / f"{name}-v{number}" for number in range(2, FORMAT)]
    return [folder for folder in (root / name, *numbered) if (folder / RECIPE_FILE).is_file()]


def _recipe(source_sha256: str) -> dict[str, object]:
    """What is in RECIPE_FILE; the versions are for a person who wonders what made these files."""
    return {
        "format": FORMAT,
        "source_sha256": source_sha256,
        "made_by": {maker: metadata.version(maker) for maker in MAKERS},
    }


def _flush(folder: Path) -> None:
    """Have the files on the disk before their name says that they are complete."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def check_sha256(path: Path, expected: str) -> None:
    """Raises Refusal unless the file's SHA-256 is `expected`."""
    found = sha256_of(path)
    if found != expected:
        raise Refusal(
            f"{path.name} has SHA-256 {found}, expected {expected}",
            "the package index served something else than the pinned file; check its configuration",
        )


@contextmanager
def _locked(path: Path, say: Say) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is fetching this model; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
