"""Machines to plan for, as the kernel shows them below /sys and /proc, laid into a folder.

CPUs are numbered as kernels number them on such machines (`lscpu -p=cpu,core,socket,node`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """`siblings` and `nodes` are lists in the kernel's notation; `gpus` maps PCI address to NUMA node."""

    online: str
    siblings: Sequence[str]
    nodes: Sequence[str]
    gpus: Mapping[str, int] = field(default_factory=dict)
    quota: str = ""  # cpu.max of the own cgroup
    other_devices: Sequence[str] = ()  # PCI addresses of another vendor

    def lay_out(self, root: Path) -> Path:
        cpu, node = root / "sys/devices/system/cpu", root / "sys/devices/system/node"
        _write(cpu / "online", self.online)
        for group in self.siblings:
            for number in _numbers(group):
                _write(cpu / f"cpu{number}/topology/thread_siblings_list", group)
        for number, cpus in enumerate(self.nodes):
            _write(node / f"node{number}/cpulist", cpus)
        for address, home in self.gpus.items():
            _pci(root, address, "0x10de", "0x030200", home)
            _write(root / f"proc/driver/nvidia/gpus/{address}/information", "Model: H200")
        for address in self.other_devices:
            _pci(root, address, "0x8086", "0x030000", 0)
        if self.gpus:
            _write(root / "dev/nvidiactl", "")
        _write(root / "proc/self/cgroup", "0::/kubepods/pod7/server")
        if self.quota:
            _write(root / "sys/fs/cgroup/kubepods/pod7/server/cpu.max", self.quota)
        return root


def _pci(root: Path, address: str, vendor: str, kind: str, node: int) -> None:
    for name, text in (("vendor", vendor), ("class", kind), ("numa_node", str(node))):
        _write(root / f"sys/bus/pci/devices/{address}/{name}", text)


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


# A small virtual machine: two CPUs that say nothing about hyperthreads.
TWO_CPUS = Machine("0-1", ["0", "1"], ["0-1"])
# One socket of 8 cores, hyperthreads numbered after all cores, one GPU that names no node.
ONE_SOCKET = Machine("0-15", [f"{n},{n + 8}" for n in range(8)], ["0-15"], {"0000:01:00.0": -1})
# Two sockets of 12 cores with hyperthreads, the GPU behind the second one, a graphics chip of another maker.
TWO_SOCKETS = Machine(
    "0-47",
    [f"{n},{n + 24}" for n in range(24)],
    ["0-11,24-35", "12-23,36-47"],
    {"0000:b1:00.0": 1},
    other_devices=["0000:00:02.0"],
)
# A node of a cluster: two sockets of 48 cores, four GPUs each.
EIGHT_GPUS = Machine(
    "0-191",
    [f"{n},{n + 96}" for n in range(96)],
    ["0-47,96-143", "48-95,144-191"],
    {f"0000:{bus}:00.0": n // 4 for n, bus in enumerate(("19", "3b", "4c", "5d", "9b", "bb", "cb", "db"))},
)
# Hyperthreads numbered side by side.
NEIGHBOURS = Machine("0-15", [f"{n}-{n + 1}" for n in range(0, 16, 2)], ["0-15"])
