"""The plan for this process: the machine, the configuration and the device, put together.

The launcher pins the server before it starts, and model processes inherit that mask: what the server as a whole was
given reaches them in an environment variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..config import Config
from ..machine.cgroup import ROOT
from ..machine.cpu_list import parse_cpus
from ..machine.device import Device, DeviceGroup
from ..machine.topology import Gpu, Topology, read_topology
from .plan import Plan, make_plan

ALLOWED_CPUS_ENV = "TRITANDEM_ALLOWED_CPUS"
VISIBLE_DEVICES_ENV = "CUDA_VISIBLE_DEVICES"
WSL_GPU = "dev/dxg"  # where Windows' driver shows itself; there is no nvidiactl then


def plan_here(config: Config, device: Device | None = None, on_gpu: bool | None = None, root: Path = ROOT) -> Plan:
    """`device` replaces the configuration's; `on_gpu` says what an `auto` came to where somebody knows. Raises
    ConfigError."""
    topology = read_topology(_allowed(os.environ), root)
    device = device or DeviceGroup.parse(config.engine.device).first
    if on_gpu is None:
        on_gpu = device.kind == "cuda" or (device.kind == "auto" and _cuda_is_likely(topology, os.environ))
    gpu = gpu_of(device, topology, os.environ) if on_gpu else None
    return make_plan(topology, config.placement, gpu, on_gpu)


def gpu_of(device: Device, topology: Topology, environ: Mapping[str, str]) -> Gpu | None:
    """The GPU that CUDA calls `device`; None where that cannot be told without asking CUDA.

    CUDA_DEVICE_ORDER=PCI_BUS_ID, which the launcher sets, makes CUDA count as the kernel does.
    """
    index = device.number
    chosen = environ.get(VISIBLE_DEVICES_ENV)
    if chosen is not None:
        words = [word.strip() for word in chosen.split(",")]
        if index >= len(words) or not words[index].isdigit():  # GPUs may be named by UUID
            return None
        index = int(words[index])
    return topology.visible_gpus[index] if index < len(topology.visible_gpus) else None


def why_no_device(device: Device, root: Path = ROOT) -> str | None:
    """Why this machine cannot have `device`, in words; None where it has it, or where CUDA alone can tell."""
    if device.kind != "cuda":
        return None
    topology = read_topology(_allowed(os.environ), root)
    if not topology.has_driver and not (root / WSL_GPU).exists():
        return "there is no NVIDIA driver on this machine"
    chosen = os.environ.get(VISIBLE_DEVICES_ENV)
    if chosen in ("", "-1"):
        return f"{VISIBLE_DEVICES_ENV} hides every GPU"
    seen = len(topology.visible_gpus) if chosen is None else len(chosen.split(","))
    if seen and device.number >= seen:
        return f"this process may use {seen} GPU{'s' if seen > 1 else ''}, numbered from 0"
    return None


def _cuda_is_likely(topology: Topology, environ: Mapping[str, str]) -> bool:
    """Without asking CUDA, which takes a second and a connection to the driver."""
    return topology.has_driver and environ.get(VISIBLE_DEVICES_ENV) not in ("", "-1")


def _allowed(environ: Mapping[str, str]) -> frozenset[int] | None:
    text = environ.get(ALLOWED_CPUS_ENV, "")
    return parse_cpus(text) if text else None
