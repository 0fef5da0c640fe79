"""GPUs that cannot be the ranks of one engine are named, with what to do; where nobody can tell, nothing is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritandem.machine.peer_access import Link, ask, iommu_is_on, why_apart, why_not

JOINED = [Link(0, 1, True, True), Link(1, 0, True, True)]


def test_gpus_that_are_joined_are_not_apart() -> None:
    assert why_not(JOINED, iommu=True) is None


@pytest.mark.parametrize(
    ("link", "iommu", "named"),
    [
        (Link(1, 0, False, False), True, "GPU 1 cannot read the memory of GPU 0; an IOMMU is on"),
        (Link(1, 0, False, False), False, "access control"),
        (Link(1, 0, True, False), False, "GPU 1 is joined without atomic operations to GPU 0"),
    ],
)
def test_the_pair_that_is_apart_is_named_with_what_to_do(link: Link, iommu: bool, named: str) -> None:
    told = why_not([JOINED[0], link], iommu)
    assert told is not None
    assert named in told
    assert "nvidia-smi topo" in told


def test_whether_an_iommu_is_on_is_read_from_the_kernel(tmp_path: Path) -> None:
    assert not iommu_is_on(tmp_path)
    (tmp_path / "sys/class/iommu/dmar0").mkdir(parents=True)
    assert iommu_is_on(tmp_path)


def test_a_gpu_alone_is_not_asked_about() -> None:
    assert why_apart([0, 0]) is None


def test_a_driver_that_has_no_such_gpus_does_not_answer() -> None:
    assert ask([900, 901]) is None


@pytest.mark.gpu
def test_the_driver_answers_for_the_gpus_that_there_are() -> None:
    import torch

    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("one GPU has no peer")
    links = ask(range(count))
    assert links is not None
    assert len(links) == count * (count - 1)
    assert all(link.access == torch.cuda.can_device_access_peer(link.reader, link.owner) for link in links)
