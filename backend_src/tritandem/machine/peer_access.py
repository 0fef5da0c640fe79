"""Whether GPUs of this machine can read each other's memory, as CUDA's driver says, and what stands in the way.

The driver is asked by a process of its own, for a second and without torch: who has spoken to it holds on to GPUs.
Numbers are those of CUDA in this process. Looks, changes nothing.

    python -m tritandem.machine.peer_access 0 1
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

from .cgroup import ROOT

ASK_TIMEOUT_S = 30
_ACCESS, _ATOMICS = 2, 3  # CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED, ..._NATIVE_ATOMIC_SUPPORTED
_IOMMU = "an IOMMU is on, which often prevents it: start the kernel with iommu=pt, or switch it off"
_OTHERS = (
    "PCIe access control (ACS) of the switches between them may be on, or a virtual machine was given them one by one"
)


@dataclass(frozen=True, slots=True)
class Link:
    """From `reader` to the memory of `owner`."""

    reader: int
    owner: int
    access: bool
    atomics: bool  # flags that both wait for can be told across it


def why_apart(gpus: Sequence[int], root: Path = ROOT) -> str | None:
    """Why these cannot be the ranks of one engine, in words; None where they can, or where nobody can tell."""
    distinct = list(dict.fromkeys(gpus))
    links = ask(distinct) if len(distinct) > 1 else None
    return why_not(links, iommu_is_on(root)) if links is not None else None


def why_not(links: Sequence[Link], iommu: bool) -> str | None:
    """The first pair that is apart, and what to do."""
    for link in links:
        if link.access and link.atomics:
            continue
        what = "cannot read the memory of" if not link.access else "is joined without atomic operations to"
        likely = _IOMMU if iommu else _OTHERS
        return (
            f"GPU {link.reader} {what} GPU {link.owner}; {likely}; `nvidia-smi topo -p2p r` shows which GPUs are joined"
        )
    return None


def iommu_is_on(root: Path = ROOT) -> bool:
    """Whether the kernel translates devices' addresses."""
    try:
        return any((root / "sys/class/iommu").iterdir())
    except OSError:
        return False


def ask(gpus: Sequence[int]) -> list[Link] | None:
    """Every ordered pair; None where the driver does not answer."""
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, *map(str, gpus)]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True)
        return [Link(*link) for link in json.loads(asked.stdout)]
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def _answer(gpus: Sequence[int]) -> list[tuple[int, int, bool, bool]]:
    """Raises OSError where there is no driver, or where it refuses."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *arguments: object) -> None:
        if code := getattr(cuda, name)(*arguments):
            raise OSError(f"{name} answers {code}")

    def attribute(kind: int, reader: int, owner: int) -> bool:
        value = ctypes.c_int()
        call("cuDeviceGetP2PAttribute", ctypes.byref(value), kind, reader, owner)
        return bool(value.value)

    call("cuInit", 0)
    return [(*pair, attribute(_ACCESS, *pair), attribute(_ATOMICS, *pair)) for pair in permutations(gpus, 2)]


if __name__ == "__main__":
    print(json.dumps(_answer([int(word) for word in sys.argv[1:]])))
