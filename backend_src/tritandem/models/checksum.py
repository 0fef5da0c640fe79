"""SHA-256 of files, and the refusal of one that is not what it should be."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ..host import Refusal

CHUNK_BYTES = 1 << 20


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def check(path: Path, expected: str) -> None:
    """Raises Refusal unless the file's SHA-256 is `expected`."""
    found = sha256_of(path)
    if found != expected:
        raise Refusal(
            f"{path.name} has SHA-256 {found}, expected {expected}",
            "the package index served something else than the pinned file; check its configuration",
        )
