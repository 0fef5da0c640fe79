"""Finds the Triton binary: the installation that $TRITANDEM_TRITON_ROOT names, else one under /opt/tritonserver, else
the one in the wheel nvidia-pytriton.

Triton's Python backend runs each model in a stub, a binary that is linked against the libpython of one Python
version: an installation is usable only if it has the stub of the Python that runs now.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from ctypes import CDLL
from dataclasses import dataclass
from pathlib import Path

from ..host import Refusal
from .guardian import STUB_NAME

ROOT_ENV = "TRITANDEM_TRITON_ROOT"
INSTALLED_ROOT = Path("/opt/tritonserver")
SUPPORTED_PYTHONS = ((3, 10), (3, 11), (3, 12))
_LIBPYTHON = re.compile(rb"libpython3\.(\d+)")
_SYSTEM_LIBRARY_DIRS = {
    Path(p) for p in ("/lib", "/usr/lib", "/lib64", "/usr/lib64", "/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu")
}


@dataclass(frozen=True, slots=True)
class TritonInstall:
    """Where the parts of one Triton lie. `needs_layout`: the stub is not yet in the Python backend's folder."""

    binary: Path
    backends: Path
    caches: Path
    stub: Path
    library_dirs: tuple[Path, ...]
    needs_layout: bool
    numpy2_corrupts: bool  # the 2.51 stub from the wheel returns broken tensors under numpy 2


def find_install(installed_root: Path = INSTALLED_ROOT, wheel_root: Path | None = None) -> TritonInstall:
    """The Triton to run. Raises Refusal when there is none, or none for the running Python."""
    version = sys.version_info[:2]
    check_python(version)
    if named := os.environ.get(ROOT_ENV):
        chosen = _installed(Path(named), version)
        if isinstance(chosen, str):
            raise Refusal(f"{ROOT_ENV} names no usable tritonserver ({chosen})", "name a folder with bin and backends")
        return chosen
    installed = _installed(installed_root, version)
    if isinstance(installed, TritonInstall):
        return installed
    in_wheel = _in_wheel(wheel_root or _wheel_root(), version)
    if isinstance(in_wheel, TritonInstall):
        return in_wheel
    raise Refusal(
        f"no usable tritonserver ({installed}; {in_wheel})",
        "install the wheel with `pip install 'tritandem[triton]'`, or run inside NVIDIA's Triton container",
    )


def check_python(version: Sequence[int]) -> None:
    """Raises Refusal for a Python that the server cannot run under."""
    if tuple(version[:2]) not in SUPPORTED_PYTHONS:
        raise Refusal(
            f"Python {version[0]}.{version[1]} is not supported (Triton's Python backend needs numpy < 2, which has "
            "no wheels for 3.13 and newer)",
            "use Python 3.10, 3.11 or 3.12",
        )


def _installed(root: Path, version: tuple[int, int]) -> TritonInstall | str:
    binary, stub = root / "bin" / "tritonserver", root / "backends" / "python" / STUB_NAME
    if not binary.is_file():
        return f"{binary} does not exist"
    if not stub.is_file():
        return f"{root} has no Python backend"
    built_for = stub_python(stub)
    if built_for != version:
        return f"the stub of {root} is built for Python {_dotted(built_for)}, this is {_dotted(version)}"
    libraries = (root / "lib", *libpython_dirs())
    return TritonInstall(binary, root / "backends", root / "caches", stub, libraries, False, False)


def _in_wheel(package: Path | None, version: tuple[int, int]) -> TritonInstall | str:
    if package is None:
        return "the package nvidia-pytriton is not installed"
    root = package / "tritonserver"
    binary, stub = root / "bin" / "tritonserver", root / "python_backend_stubs" / _dotted(version) / STUB_NAME
    if not binary.is_file():
        return f"{binary} does not exist"
    if not stub.is_file():
        return f"nvidia-pytriton has no stub for Python {_dotted(version)}"
    libraries = (package.parent / "nvidia_pytriton.libs", *libpython_dirs())
    return TritonInstall(binary, root / "backends", root / "caches", stub, libraries, True, True)


def _wheel_root() -> Path | None:
    spec = importlib.util.find_spec("pytriton")
    locations = spec.submodule_search_locations if spec else None
    return Path(next(iter(locations))) if locations else None


def stub_python(stub: Path) -> tuple[int, int] | None:
    """The Python version that a stub is linked against, read from its library names; None when it has none."""
    match = _LIBPYTHON.search(stub.read_bytes())
    return (3, int(match[1])) if match else None


def libpython_dirs() -> tuple[Path, ...]:
    """The folder of the running Python's shared library, unless the loader finds it by itself.

    Raises Refusal when this Python was built without a shared library: the stub could not start.
    """
    name = sysconfig.get_config_var("INSTSONAME") or ""
    if not name.startswith("libpython") or ".so" not in name:
        name = f"libpython{_dotted(sys.version_info[:2])}.so.1.0"
    for folder in (Path(sysconfig.get_config_var("LIBDIR") or "/nonexistent"), Path(sys.base_prefix) / "lib"):
        if (folder / name).exists():
            return () if folder in _SYSTEM_LIBRARY_DIRS else (folder,)
    try:
        CDLL(name)
    except OSError:
        raise Refusal(
            f"{sys.executable} has no shared library {name}, which Triton's Python backend is linked against",
            "use a Python built with --enable-shared (a distribution's own; on Debian add the package "
            f"libpython{_dotted(sys.version_info[:2])})",
        ) from None
    return ()


def _dotted(version: Sequence[int] | None) -> str:
    return f"{version[0]}.{version[1]}" if version else "unknown"
