"""The secret of this server's own processes: what tells a call of theirs from a stranger's.

Triton serves every model of a repository to every client, also those that only our own processes may use. Pure but for
where the secret comes from: the environment, where `tritandem serve` puts a new one at every start, or else a file of
this user's in shared memory, which every model's process needs anyway and which no other user may read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import tempfile
from pathlib import Path

import numpy as np

from ...config import INNER_KEY_ENV
from ...contracts.arrays import Int64Array
from ...contracts.errors import ConfigError, InvalidRequest

SECRET_BYTES = 32
MIN_CHARS = 16  # of the environment variable
WORDS = 2  # int64 words of a key or a seal: 128 bits
FOLDER = Path("/dev/shm")


class InnerKey:
    """Calls carry a key in front of their header; what a client could pass on or make up carries a seal over it."""

    def __init__(self, secret: bytes) -> None:
        self._call = _derived(secret, b"calls")
        self._call_words: Int64Array = np.frombuffer(self._call, np.int64)
        self._seal = _derived(secret, b"seals")

    def lock(self, header: Int64Array) -> Int64Array:
        """int64 [n] -> [WORDS + n]"""
        locked: Int64Array = np.concatenate((self._call_words, header))
        return locked

    def unlock(self, header: Int64Array) -> Int64Array:
        """[WORDS + n] -> a view of [n]. Raises InvalidRequest for a call that is not of this server."""
        if not hmac.compare_digest(header[:WORDS].tobytes(), self._call):
            raise InvalidRequest("header", "a call without the key of this server", "calls of the server's own models")
        return header[WORDS:]

    def seal(self, numbers: Int64Array, text: bytes) -> Int64Array:
        """[WORDS] over both: nobody else can make it, and it says nothing about the secret."""
        mac = hashlib.blake2b(len(numbers).to_bytes(8, "little"), key=self._seal, digest_size=16)
        mac.update(numbers.tobytes())
        mac.update(text)
        return np.frombuffer(mac.digest(), np.int64)


def load_inner_key() -> InnerKey:
    """Raises ConfigError where there is none to be had."""
    given = os.environ.get(INNER_KEY_ENV)
    if given is None:
        return InnerKey(_secret_of_file(FOLDER / f"tritandem-{os.geteuid()}.key"))
    if len(given) < MIN_CHARS:
        raise ConfigError(f"{INNER_KEY_ENV}: given {len(given)} characters, allowed: at least {MIN_CHARS}, or unset")
    return InnerKey(given.encode("utf-8", "surrogateescape"))


def _derived(secret: bytes, purpose: bytes) -> bytes:
    return hashlib.blake2b(purpose, key=hashlib.sha256(secret).digest(), digest_size=16).digest()


def _secret_of_file(path: Path) -> bytes:
    """Of the first process of this user that asked: one small file a user, for as long as the shared memory lives."""
    try:
        if not path.exists():
            _create(path)
        # Nobody who may write to the folder makes this wait or read somewhere else.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            info = os.fstat(descriptor)
            secret = file.read(SECRET_BYTES + 1) if stat.S_ISREG(info.st_mode) else b""
    except OSError as error:
        raise ConfigError(f"{path}: the key of this user's servers cannot be read or made: {error.strerror}") from error
    if info.st_uid != os.geteuid() or info.st_mode & 0o077 or len(secret) != SECRET_BYTES:
        raise ConfigError(f"{path}: not the key that a server of this user wrote; remove it")
    return secret


def _create(path: Path) -> None:
    """Whole or not at all; of several that try at once, one succeeds."""
    descriptor, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        os.link(name, path)
    except FileExistsError:
        return
    finally:
        os.unlink(name)
