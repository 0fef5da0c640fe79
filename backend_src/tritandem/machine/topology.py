"""What the kernel says about the machine: CPUs, their cores and NUMA nodes, the quota, NVIDIA's GPUs.

A CPU is what the kernel schedules on; a core is what its hyperthread siblings share. Looks, changes nothing. Facts that
a kernel does not offer fall back to the simplest machine: one CPU a core, one node, no quota, no GPU.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .cgroup import ROOT, quota_cores
from .cpu_list import parse_cpus

NVIDIA_VENDOR, DISPLAY_CLASS = "0x10de", "0x03"
UNKNOWN_NODE = -1


@dataclass(frozen=True, slots=True)
class Cpu:
    """`core` is the lowest CPU among the hyperthread siblings, which names the core."""

    id: int
    core: int
    node: int


@dataclass(frozen=True, slots=True)
class Gpu:
    """`address` is the PCI address as the kernel spells it; `node` is -1 where the machine does not tell."""

    address: str
    node: int


@dataclass(frozen=True, slots=True)
class Topology:
    cpus: tuple[Cpu, ...]  # those that this server may use, ascending
    online_cpus: int  # of the whole machine
    quota_cores: float | None  # CPU seconds a second that the cgroup grants; None: no limit
    gpus: tuple[Gpu, ...]  # of the whole machine, by address
    visible_gpus: tuple[Gpu, ...] = ()  # those that the driver shows in this container, by address
    has_driver: bool = False  # CUDA could be used here

    @property
    def restricted(self) -> bool:
        """Somebody has given this server a part of the machine's CPUs."""
        return len(self.cpus) < self.online_cpus


def read_topology(allowed: frozenset[int] | None = None, root: Path = ROOT) -> Topology:
    """The machine below `root`, as far as the CPUs `allowed` (None: this process's affinity) reach."""
    system = root / "sys/devices/system"
    given = frozenset(os.sched_getaffinity(0)) if allowed is None else allowed
    online = _cpus_in(system / "cpu/online") or given
    nodes = {cpu: node for node, members in _nodes(system / "node") for cpu in members}
    # An online list that has nothing in common with what is allowed is another machine's: trust the mask.
    usable = sorted(given & online or given)
    cpus = tuple(Cpu(cpu, _core_of(system, cpu), nodes.get(cpu, 0)) for cpu in usable)
    gpus = tuple(_gpus(root / "sys/bus/pci/devices"))
    addresses = _names(root / "proc/driver/nvidia/gpus")
    visible = tuple(gpu for gpu in gpus if gpu.address in addresses)
    has_driver = (root / "dev/nvidiactl").exists()
    return Topology(cpus, max(len(online), len(cpus)), quota_cores(root), gpus, visible, has_driver)


def usable_cores(cpus: int, quota_cores: float | None) -> int:
    """Threads that can run at once on `cpus` CPUs under the quota: whole ones, at least 1."""
    return max(1, cpus if quota_cores is None else min(cpus, int(quota_cores)))


def _nodes(folder: Path) -> Iterator[tuple[int, frozenset[int]]]:
    for path in folder.glob("node[0-9]*"):
        yield int(path.name.removeprefix("node")), _cpus_in(path / "cpulist")


def _core_of(system: Path, cpu: int) -> int:
    siblings = _cpus_in(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
    return min(siblings, default=cpu)


def _gpus(devices: Path) -> Iterator[Gpu]:
    for name in sorted(_names(devices)):
        folder = devices / name
        if _text(folder / "vendor") == NVIDIA_VENDOR and _text(folder / "class").startswith(DISPLAY_CLASS):
            node = _text(folder / "numa_node")
            yield Gpu(name, int(node) if node else UNKNOWN_NODE)


def _cpus_in(path: Path) -> frozenset[int]:
    try:
        return parse_cpus(_text(path))
    except ValueError:
        return frozenset()


def _names(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder))
    except OSError:
        return frozenset()


def _text(path: Path) -> str:
    """Without the line's end; "" when there is no such file."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
