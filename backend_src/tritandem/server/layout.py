"""Lays out the wheel's Triton as the binary wants it: the stub of the running Python inside the backend's folder.

The wheel keeps one stub per Python version apart from the backend. Nothing is written into site-packages, which
may be read-only or shared: the layout lies in the cache folder under a name made from its ingredients.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

from ..host import Refusal
from .locate import TritonInstall


def backend_folder(install: TritonInstall, cache: Path) -> Path:
    """The folder for --backend-directory; made when missing. Safe against concurrent starts: the finished folder
    is renamed into place, and whoever comes second uses the first one's. Raises Refusal."""
    if not install.needs_layout:
        return install.backends
    target = cache / "triton" / _fingerprint(install)
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
        try:
            _copy(install, building)
            os.rename(building, target)
        except OSError:
            if not target.is_dir():
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    except OSError as error:
        raise Refusal(
            f"cannot lay out Triton's backend in {target}: {error.strerror}",
            "free some space there, or set XDG_CACHE_HOME to a folder that can be written",
        ) from error
    return target


def _copy(install: TritonInstall, folder: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(install.backends, folder, dirs_exist_ok=True, ignore=ignored)
    stub = folder / "python" / install.stub.name
    shutil.copyfile(install.stub, stub)
    stub.chmod(0o755)
    folder.chmod(0o755)


def _fingerprint(install: TritonInstall) -> str:
    """Changes whenever a file that the layout copies is another one."""
    digest = hashlib.sha256()
    for path in sorted([*install.backends.glob("*/*.so"), *install.backends.glob("*/*.py"), install.stub]):
        stat = path.stat()
        digest.update(f"{path}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
