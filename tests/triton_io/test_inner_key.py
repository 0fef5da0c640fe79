"""Only processes of one server know its key, with a launcher and without; nothing that they say gives it away."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
from tritandem.config import INNER_KEY_ENV
from tritandem.contracts.errors import ConfigError, InvalidRequest
from tritandem.triton_io.hops import engine_wire, inner_key
from tritandem.triton_io.hops.engine_wire import Op
from tritandem.triton_io.hops.inner_key import InnerKey, load_inner_key

CALL = engine_wire.pack_call(Op.CANCEL, [7, 8])


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_key, "FOLDER", tmp_path)
    monkeypatch.delenv(INNER_KEY_ENV, raising=False)


def opens(one: InnerKey, other: InnerKey) -> bool:
    try:
        return bool(np.array_equal(other.unlock(one.lock(CALL)), CALL))
    except InvalidRequest:
        return False


def test_a_call_opens_with_the_key_that_locked_it_and_with_no_other() -> None:
    assert opens(InnerKey(b"a"), InnerKey(b"a"))
    assert not opens(InnerKey(b"a"), InnerKey(b"b"))
    for header in (CALL, np.zeros(0, np.int64), np.zeros(9, np.int64), InnerKey(b"a").lock(CALL)[1:]):
        with pytest.raises(InvalidRequest, match="header: given 'a call without the key of this server'"):
            InnerKey(b"a").unlock(header)


def test_a_seal_is_over_everything_and_says_nothing_about_the_key() -> None:
    key, stamps = InnerKey(b"a"), np.array([1, 2], np.int64)
    seal = key.seal(stamps, b"word").tolist()
    assert seal == key.seal(stamps, b"word").tolist()
    others = [
        key.seal(stamps + 1, b"word"),
        key.seal(stamps[:1], stamps[1:].tobytes() + b"word"),
        key.seal(stamps, b""),
        InnerKey(b"b").seal(stamps, b"word"),
    ]
    assert all(seal != other.tolist() for other in others)
    assert not set(seal) & set(key.lock(CALL).tolist())


def test_the_launchers_key_is_taken_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INNER_KEY_ENV, "of this start, and of no other")
    assert opens(load_inner_key(), load_inner_key())
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(INNER_KEY_ENV, "")
    with pytest.raises(ConfigError, match="given 0 characters"):
        load_inner_key()


def test_without_a_launcher_all_processes_find_one_key_that_nobody_else_may_read(tmp_path: Path) -> None:
    keys: list[InnerKey] = []
    threads = [threading.Thread(target=lambda: keys.append(load_inner_key())) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(keys) == 16
    assert all(opens(keys[0], key) for key in keys)
    [file] = tmp_path.iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.stat().st_size == inner_key.SECRET_BYTES


@pytest.mark.parametrize("kind", ["readable", "short", "a link", "a pipe", "a folder", "no place"])
def test_a_file_that_somebody_else_put_there_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = tmp_path / f"tritandem-{os.geteuid()}.key"
    if kind == "readable":
        path.write_bytes(bytes(inner_key.SECRET_BYTES))
        path.chmod(0o644)
    elif kind == "short":
        path.touch(0o600)
    elif kind == "a link":
        (tmp_path / "elsewhere").write_bytes(bytes(inner_key.SECRET_BYTES))
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "a pipe":
        os.mkfifo(path, 0o600)
    elif kind == "a folder":
        path.mkdir()
    else:
        monkeypatch.setattr(inner_key, "FOLDER", tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"tritandem-[0-9]+\.key: "):
        load_inner_key()
