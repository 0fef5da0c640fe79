"""Programs of Debian packages: the installed one, or one that is fetched into the cache folder, which needs no root.

`apt-get`, with lists and archives in a folder of its own, downloads the packages; `dpkg-deb` unpacks them. Nothing is
installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest
from tritandem.host import cache_root

PACKAGES = ("prometheus", "nginx", "libnginx-mod-http-js")
STEP_TIMEOUT_S = 20  # of each command; seconds in all where a mirror answers


def debian_program(name: str) -> str:
    """The path of a program of PACKAGES. Skips the test where it is neither installed nor to be fetched."""
    installed = shutil.which(name) or shutil.which(name, path="/usr/sbin")
    if installed:
        return installed
    folder, problem = _fetched()
    found = shutil.which(name, path=f"{folder}/usr/bin:{folder}/usr/sbin")
    if found is None:
        pytest.skip(
            f"{name} is not installed (Debian packages {', '.join(PACKAGES)}), and not to be fetched: {problem}"
        )
    return found


@cache
def _fetched() -> tuple[Path, str]:
    """(folder of the packages' files, "") or (a folder that does not exist, why)."""
    target = cache_root() / "test-programs" / "-".join(PACKAGES)
    if target.is_dir():
        return target, ""
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        return target, "there is no apt-get or dpkg-deb"
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=target.parent) as name:
        work = Path(name)
        for made in ("lists/partial", "cache/archives/partial", "files"):
            (work / made).mkdir(parents=True)
        private = (f"Dir::State::lists={work}/lists", f"Dir::Cache={work}/cache", "APT::Sandbox::User=")
        apt = ["apt-get", "-q", *(word for option in private for word in ("-o", option))]
        try:
            _run([*apt, "update"], work)
            _run([*apt, "download", *PACKAGES], work)
            for archive in work.glob("*.deb"):
                _run(["dpkg-deb", "-x", str(archive), str(work / "files")], work)
            (work / "files").rename(target)
        except (subprocess.SubprocessError, OSError) as error:  # OSError also when another run was first
            return target, str(error)
    return target, ""


def _run(words: list[str], folder: Path) -> None:
    """Raises SubprocessError."""
    subprocess.run(
        words,
        cwd=folder,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=STEP_TIMEOUT_S,
    )
