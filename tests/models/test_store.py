"""A model's folder is complete or absent, whoever builds it and however that ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import threading
from importlib import metadata
from pathlib import Path

import pytest
from tritandem.host import Refusal
from tritandem.models import store

SUM = "a" * 64


def write_model(scratch: Path, out: Path) -> None:
    (scratch / "download").write_text("raw")
    (out / "config.json").write_text("{}")


def ignore(text: str) -> None:
    """Progress nobody reads."""


def test_a_model_is_built_once(tmp_path: Path) -> None:
    folder = store.build("tiny", SUM, write_model, ignore, tmp_path)
    assert (folder / "config.json").read_text() == "{}"

    def must_not_run(scratch: Path, out: Path) -> None:
        raise AssertionError("built again")

    assert store.build("tiny", SUM, must_not_run, ignore, tmp_path) == folder
    assert store.find("tiny", SUM, tmp_path) == folder


def test_nothing_but_the_folder_and_its_lock_remains(tmp_path: Path) -> None:
    store.build("tiny", SUM, write_model, ignore, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tiny.lock", f"tiny-v{store.FORMAT}"]


def test_a_failed_build_leaves_no_folder(tmp_path: Path) -> None:
    def fail(scratch: Path, out: Path) -> None:
        write_model(scratch, out)
        raise Refusal("half way", "try again")

    with pytest.raises(Refusal, match="half way"):
        store.build("tiny", SUM, fail, ignore, tmp_path)
    assert store.find("tiny", SUM, tmp_path) is None
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tiny.lock"]


def test_another_source_replaces_the_folder(tmp_path: Path) -> None:
    store.build("tiny", SUM, write_model, ignore, tmp_path)
    assert store.find("tiny", "b" * 64, tmp_path) is None

    def write_other(scratch: Path, out: Path) -> None:
        (out / "other.json").write_text("{}")

    folder = store.build("tiny", "b" * 64, write_other, ignore, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["other.json", store.RECIPE_FILE]


def test_what_an_older_version_made_is_made_again_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, told = tmp_path / "tiny", []
    old.mkdir()
    (old / store.RECIPE_FILE).write_text(json.dumps({"format": 1, "source_sha256": SUM}))
    second = store.build("tiny", SUM, write_model, told.append, tmp_path)
    assert second != old
    assert old.is_dir(), "its readers need it"
    assert any(f"{old} was made by an older version" in line for line in told)
    monkeypatch.setattr(store, "FORMAT", store.FORMAT + 1)
    third = store.build("tiny", SUM, write_model, told.append, tmp_path)
    assert third not in (old, second)
    assert any(f"{second} was made by an older version" in line for line in told)


def test_a_folder_says_what_made_it(tmp_path: Path) -> None:
    recipe = json.loads((store.build("tiny", SUM, write_model, ignore, tmp_path) / store.RECIPE_FILE).read_text())
    assert recipe["format"] == store.FORMAT
    assert recipe["source_sha256"] == SUM
    assert recipe["made_by"]["transformers"] == metadata.version("transformers")


def test_concurrent_builders_wait_for_one_another(tmp_path: Path) -> None:
    builds, waiting, release = [], threading.Event(), threading.Event()

    def slow(scratch: Path, out: Path) -> None:
        builds.append(1)
        assert waiting.wait(10)
        write_model(scratch, out)

    def say(text: str) -> None:
        assert "waiting" in text
        waiting.set()

    first = threading.Thread(target=store.build, args=("tiny", SUM, slow, ignore, tmp_path))
    first.start()
    while not builds:
        release.wait(0.01)
    store.build("tiny", SUM, slow, say, tmp_path)
    first.join()
    assert len(builds) == 1


KILLED_HALF_WAY = """
    import os, signal, sys
    from pathlib import Path
    from tritandem.models import store
    def make(scratch, out):
        (out / "config.json").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
    store.build("tiny", "a" * 64, make, print, Path(sys.argv[1]))
"""


def test_a_build_that_was_killed_is_taken_up_afresh(tmp_path: Path) -> None:
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED_HALF_WAY), str(tmp_path)])
    assert killed.returncode == -signal.SIGKILL
    assert store.find("tiny", SUM, tmp_path) is None
    folder = store.build("tiny", SUM, write_model, ignore, tmp_path)
    assert (folder / "config.json").read_text() == "{}"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".tiny.lock", f"tiny-v{store.FORMAT}"]


def test_an_unwritable_cache_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match=r"cannot write the model cache .*XDG_CACHE_HOME"):
        store.build("tiny", SUM, write_model, ignore, tmp_path / "file")
