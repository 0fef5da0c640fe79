"""The decision: who runs where. A pure function of the topology and the `[placement]` table.

`auto` pins only where it cannot hurt:
- Everything stays on one NUMA node, the GPU's, when that node alone has enough cores: messages between the processes
  and pinned memory then never cross sockets. Any core of the node may be used: nothing is trapped on a busy one.
- Cores of their own are for machines that have them to spare: at least DEDICATED_CORES for each GPU of the node, and
  no CPU quota, which says that others use the same cores. The thread that launches steps then has a core to itself,
  hyperthread sibling included, and no other component comes near it.
- Anything smaller is left to the kernel: with a handful of cores a pinned thread waits while another core is idle.

GPUs of a node share its cores out by their PCI order, so that one server a GPU needs no agreement between servers. CPUs
that an affinity mask gave to this server are its own and are not shared out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..config import PlacementConfig
from ..contracts.errors import ConfigError
from ..machine.cpu_list import format_cpus, parse_cpus
from ..machine.topology import Cpu, Gpu, Topology, usable_cores

ENGINE, ENGINE_HOST, SCHEDULER, TOKENIZER, SERVER = "engine", "engine_host", "scheduler", "tokenizer", "server"
COMPONENTS = (ENGINE, ENGINE_HOST, SCHEDULER, TOKENIZER, SERVER)
# Fewer cores a GPU than these are shared by all components.
DEDICATED_CORES = 8
# One launches steps, one hands tokens out; the scheduler's Python and its senders.
GPU_ENGINE_CORES, SCHEDULER_CORES = 2, 2
# Beside an engine that computes on the CPU itself.
CORES_BESIDE_CPU_ENGINE = 3
# More pieces of one text at once gain nothing.
MAX_TOKENIZER_THREADS = 8


@dataclass(frozen=True, slots=True)
class Share:
    """`cpus` is empty where the kernel decides; `threads` is what a pool of this component may compute with."""

    cpus: frozenset[int]
    threads: int


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything of this server stays in `home`, also while it loads; that is every CPU it was given, or one node's."""

    shares: Mapping[str, Share]
    home: frozenset[int]
    reason: str

    @property
    def dedicated(self) -> bool:
        """Components have CPUs that others keep away from."""
        return len({share.cpus for share in self.shares.values()}) > 1

    def cpus_of(self, component: str) -> frozenset[int]:
        """Where the component's threads may run: never empty."""
        return self.shares[component].cpus or self.home

    def describe(self, component: str) -> str:
        share = self.shares[component]
        where = "on" if share.cpus else "anywhere on"
        threads = "1 compute thread" if share.threads == 1 else f"{share.threads} compute threads"
        return f"{where} CPUs {format_cpus(self.cpus_of(component))}, {threads} ({self.reason})"


def make_plan(topology: Topology, config: PlacementConfig, gpu: Gpu | None = None, on_gpu: bool = False) -> Plan:
    """Raises ConfigError for CPUs that do not exist here. `gpu` is None when it is unknown or the engine computes on
    the CPU; `on_gpu` tells the two apart."""
    if config.policy == "explicit":
        return _explicit(topology, config, on_gpu)
    for name in COMPONENTS:
        if cpus := getattr(config, name):
            raise ConfigError(f'placement.{name}: given {cpus!r}, allowed: a list only with policy = "explicit"')
    if config.policy == "off":
        return _unpinned(topology, _all(topology), on_gpu, "placement is off")
    return _auto(topology, gpu, on_gpu)


def _auto(topology: Topology, gpu: Gpu | None, on_gpu: bool) -> Plan:
    node, where = _home_node(topology, gpu)
    cores = _cores(topology, node)
    if gpu is not None:  # the engine takes the first ones
        cores.sort(key=lambda core: core[0].node != gpu.node)
    home = _cpus(cores)
    if topology.quota_cores is not None:
        quota = f"a quota of {topology.quota_cores:g} cores: others use these cores, too"
        return _unpinned(topology, home, on_gpu, f"{where}{quota}")
    if on_gpu and not topology.restricted:
        if gpu is None and len(topology.gpus) > 1:
            many = f"which of {len(topology.gpus)} GPUs this is cannot be told"
            return _unpinned(topology, home, on_gpu, f"{where}{many}")
        cores = _slice(topology, cores, gpu)
    if len(cores) < DEDICATED_CORES:
        few = f"{len(cores)} cores: too few to give any away"
        return _unpinned(topology, home, on_gpu, f"{where}{few}")
    shares = _gpu_shares(cores) if on_gpu else _cpu_shares(cores)
    return Plan(shares, _cpus(cores), f"{where}{len(cores)} cores")


def _gpu_shares(cores: list[list[Cpu]]) -> dict[str, Share]:
    engine, rest = cores[:GPU_ENGINE_CORES], cores[GPU_ENGINE_CORES:]
    others = rest[SCHEDULER_CORES:]
    return {
        # The launching thread's core is left to it alone.
        ENGINE_HOST: Share(_cpus(engine[:1]), 1),
        ENGINE: Share(_cpus(engine[1:]), 1),
        # Two cores are left to it, and more where they are idle: bound to the two, its threads waited for each other.
        SCHEDULER: Share(_cpus(rest), 1),
        TOKENIZER: Share(_cpus(others), min(len(others), MAX_TOKENIZER_THREADS)),
        SERVER: Share(_cpus(others), 1),
    }


def _cpu_shares(cores: list[list[Cpu]]) -> dict[str, Share]:
    others, engine = cores[:CORES_BESIDE_CPU_ENGINE], cores[CORES_BESIDE_CPU_ENGINE:]
    # Hyperthreads of one core share the units that a matrix product keeps busy: one thread a core.
    ours, theirs = Share(_cpus(engine), len(engine)), Share(_cpus(others), 1)
    tokenizer = Share(theirs.cpus, len(others))
    return {ENGINE: ours, ENGINE_HOST: ours, SCHEDULER: theirs, TOKENIZER: tokenizer, SERVER: theirs}


def _unpinned(topology: Topology, home: frozenset[int], on_gpu: bool, reason: str) -> Plan:
    """Nobody has cores of their own."""
    cpus = [cpu for cpu in topology.cpus if cpu.id in home]
    cores = usable_cores(len({cpu.core for cpu in cpus}), topology.quota_cores)
    # One thread less than cores: two threads that wait for each other beside a busy neighbour are slower than one.
    engine = 1 if on_gpu else max(1, cores - 1)
    tokenizer = min(usable_cores(len(cpus), topology.quota_cores), MAX_TOKENIZER_THREADS)
    threads = {ENGINE: engine, ENGINE_HOST: engine, TOKENIZER: tokenizer}
    pinned = home if len(cpus) < len(topology.cpus) else frozenset()
    return Plan({name: Share(pinned, threads.get(name, 1)) for name in COMPONENTS}, home, reason)


def _explicit(topology: Topology, config: PlacementConfig, on_gpu: bool) -> Plan:
    """Components without a list stay where the kernel puts them; the host thread stays with its engine."""
    allowed = _all(topology)
    cores = {cpu.id: cpu.core for cpu in topology.cpus}
    free = _unpinned(topology, allowed, on_gpu, "").shares
    shares: dict[str, Share] = {}
    for name in COMPONENTS:
        cpus = read_cpus(f"placement.{name}", getattr(config, name), allowed)
        if not cpus:
            shares[name] = shares[ENGINE] if name == ENGINE_HOST else free[name]
            continue
        own = usable_cores(len({cores[cpu] for cpu in cpus}), topology.quota_cores)
        threads = {ENGINE: 1 if on_gpu else own, TOKENIZER: min(own, MAX_TOKENIZER_THREADS)}
        shares[name] = Share(cpus, threads.get(name, 1))
    if config.engine_host and not on_gpu:
        raise ConfigError(
            f"placement.engine_host: given {config.engine_host!r}, allowed: nothing for an engine on the CPU, whose "
            "compute threads would all be started on that thread's CPUs"
        )
    return Plan(shares, allowed, "as configured")


def read_cpus(field: str, text: str, allowed: frozenset[int]) -> frozenset[int]:
    """Raises ConfigError for a malformed list and for CPUs that this server may not use."""
    try:
        cpus = parse_cpus(text)
    except ValueError:
        raise ConfigError(f"{field}: given {text!r}, allowed: a list of CPUs such as 2-5,8") from None
    if cpus - allowed:
        raise ConfigError(f"{field}: given {text!r}, allowed: CPUs among {format_cpus(allowed)}")
    return cpus


def _home_node(topology: Topology, gpu: Gpu | None) -> tuple[int | None, str]:
    """(node to stay on, None: all of them; how to say so)."""
    nodes = sorted({cpu.node for cpu in topology.cpus})
    if len(nodes) < 2:
        return None, ""
    if gpu is not None and gpu.node in nodes:
        node, why = gpu.node, f"GPU {gpu.address}"
    else:
        node, why = max(nodes, key=lambda candidate: (len(_cores(topology, candidate)), -candidate)), "the largest"
    enough = len(_cores(topology, node)) >= min(DEDICATED_CORES, topology.quota_cores or DEDICATED_CORES)
    return (node, f"NUMA node {node} of {why}, ") if enough else (None, "")


def _cores(topology: Topology, node: int | None) -> list[list[Cpu]]:
    """The CPUs of each core, siblings together, in the kernel's order."""
    cores: dict[int, list[Cpu]] = {}
    for cpu in topology.cpus:
        if node is None or cpu.node == node:
            cores.setdefault(cpu.core, []).append(cpu)
    return list(cores.values())


def _slice(topology: Topology, cores: list[list[Cpu]], gpu: Gpu | None) -> list[list[Cpu]]:
    """This GPU's part of the cores; all of them where it is the only one."""
    if gpu is None:
        return cores
    # Cores of several nodes are shared out among all GPUs, those of one node among the GPUs there.
    several_nodes = len({core[0].node for core in cores}) > 1
    neighbours = [other for other in topology.gpus if several_nodes or other.node == gpu.node]
    each = len(cores) // len(neighbours)
    first = neighbours.index(gpu) * each
    return cores[first : first + each]


def _all(topology: Topology) -> frozenset[int]:
    return frozenset(cpu.id for cpu in topology.cpus)


def _cpus(cores: list[list[Cpu]]) -> frozenset[int]:
    return frozenset(cpu.id for core in cores for cpu in core)
