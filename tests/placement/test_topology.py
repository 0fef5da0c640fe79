"""What the kernel's files say is read right; what it does not say falls back to the simplest machine."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from tritandem.machine.cgroup import quota_cores
from tritandem.machine.cpu_list import format_cpus, parse_cpus
from tritandem.machine.device import Device
from tritandem.machine.topology import read_topology, usable_cores
from tritandem.placement import why_no_device

from tests.placement.machines import EIGHT_GPUS, NEIGHBOURS, ONE_SOCKET, TWO_CPUS, TWO_SOCKETS

ALL = frozenset(range(256))


@pytest.mark.parametrize("text", ["", "0", "0-3", "0-3,8,10-11", "5,7,9"])
def test_cpu_lists_are_read_and_written_alike(text: str) -> None:
    assert format_cpus(parse_cpus(text)) == text


@pytest.mark.parametrize("text", ["x", "3-1", "-1", "1-", "0-9000", "1;2"])
def test_a_malformed_cpu_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        parse_cpus(text)


def test_hyperthreads_are_one_core_however_they_are_numbered(tmp_path: Path) -> None:
    far = read_topology(ALL, ONE_SOCKET.lay_out(tmp_path / "far"))
    near = read_topology(ALL, NEIGHBOURS.lay_out(tmp_path / "near"))
    assert len({cpu.core for cpu in far.cpus}) == len({cpu.core for cpu in near.cpus}) == 8
    assert [cpu.core for cpu in far.cpus] == [*range(8), *range(8)]
    assert [cpu.core for cpu in near.cpus] == [n - n % 2 for n in range(16)]


def test_gpus_are_nvidias_with_their_nodes(tmp_path: Path) -> None:
    topology = read_topology(ALL, TWO_SOCKETS.lay_out(tmp_path))
    assert [(gpu.address, gpu.node) for gpu in topology.gpus] == [("0000:b1:00.0", 1)]
    assert topology.visible_gpus == topology.gpus
    assert topology.has_driver


@pytest.mark.parametrize(
    ("device", "visible", "words"),
    [
        ("cuda", None, None),
        ("cuda:7", None, None),
        ("cuda:8", None, "this process may use 8 GPUs, numbered from 0"),
        ("cuda:1", "3", "this process may use 1 GPU, numbered from 0"),
        ("cuda", "", "CUDA_VISIBLE_DEVICES hides every GPU"),
        ("auto", "", None),
        ("cpu", "-1", None),
    ],
)
def test_a_gpu_that_is_not_there_is_known_before_cuda_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, visible: str | None, words: str | None
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert why_no_device(Device.parse(device), EIGHT_GPUS.lay_out(tmp_path)) == words


def test_without_a_driver_there_is_no_gpu_unless_windows_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    root = TWO_CPUS.lay_out(tmp_path)
    assert why_no_device(Device("cuda"), root) == "there is no NVIDIA driver on this machine"
    (root / "dev").mkdir()
    (root / "dev/dxg").touch()
    assert why_no_device(Device("cuda"), root) is None


def test_a_mask_leaves_what_it_allows(tmp_path: Path) -> None:
    root = EIGHT_GPUS.lay_out(tmp_path)
    topology = read_topology(frozenset({3, 99, 60}), root)
    assert [(cpu.id, cpu.core, cpu.node) for cpu in topology.cpus] == [(3, 3, 0), (60, 60, 1), (99, 3, 0)]
    assert topology.restricted
    assert not read_topology(ALL, root).restricted


def test_a_kernel_without_these_files_is_the_simplest_machine(tmp_path: Path) -> None:
    topology = read_topology(frozenset({1, 4}), tmp_path)
    assert [(cpu.id, cpu.core, cpu.node) for cpu in topology.cpus] == [(1, 1, 0), (4, 4, 0)]
    assert (topology.quota_cores, topology.gpus, topology.restricted) == (None, (), False)


def test_this_machine_can_be_read() -> None:
    topology = read_topology()
    assert {cpu.id for cpu in topology.cpus} == os.sched_getaffinity(0)
    assert topology.online_cpus >= len(topology.cpus)


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", None), ("250000 100000", 2.5), ("50000 100000", 0.5), ("?", None)]
)
def test_the_quota_of_the_own_group_counts(tmp_path: Path, quota: str, cores: float | None) -> None:
    assert quota_cores(replace(TWO_CPUS, quota=quota).lay_out(tmp_path)) == cores


def test_the_tightest_quota_of_all_parents_counts(tmp_path: Path) -> None:
    root = replace(TWO_CPUS, quota="800000 100000").lay_out(tmp_path)
    (root / "sys/fs/cgroup/kubepods/cpu.max").write_text("300000 100000\n")
    assert quota_cores(root) == 3.0


def test_inside_a_container_the_quota_stands_at_the_mount(tmp_path: Path) -> None:
    root = TWO_CPUS.lay_out(tmp_path)
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_text("150000 100000\n")
    assert quota_cores(root) == 1.5


def test_version_1_of_cgroups_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/x\n3:cpu,cpuacct:/box\n")
    group = tmp_path / "sys/fs/cgroup/cpu/box"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("400000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert quota_cores(tmp_path) == 4.0
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert quota_cores(tmp_path) is None


@pytest.mark.parametrize(("cpus", "quota", "cores"), [(64, None, 64), (64, 2.5, 2), (64, 0.5, 1), (1, 8.0, 1)])
def test_a_quota_bounds_what_runs_at_once(cpus: int, quota: float | None, cores: int) -> None:
    assert usable_cores(cpus, quota) == cores
