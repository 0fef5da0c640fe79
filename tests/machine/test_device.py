"""A device is written in one way and read in one place."""

from __future__ import annotations

import re

import pytest
from tritandem.machine.device import Device, DeviceGroup, is_device


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("auto", Device("auto")),
        ("cpu", Device("cpu")),
        ("cuda", Device("cuda")),
        ("cuda:0", Device("cuda", 0)),
        ("cuda:12", Device("cuda", 12)),
    ],
)
def test_a_device_is_written_as_it_is_read(text: str, device: Device) -> None:
    assert Device.parse(text) == device
    assert str(device) == text


def test_a_gpu_without_a_number_is_the_first() -> None:
    assert (Device("cuda").number, Device("cuda", 3).number) == (0, 3)


@pytest.mark.parametrize(
    "text", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:00000", "cuda:\u0661", "cpu:0", "cuda:0+cuda:1"]
)
def test_what_names_no_device_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match=r"^given .*, allowed: auto, cpu, cuda, cuda:N$"):
        Device.parse(text)


@pytest.mark.parametrize("text", ["auto", "cuda", "cuda:3", "cuda:0+cuda:1", "cuda:0+cuda:0", "cpu+cpu+cpu"])
def test_devices_of_one_engine_are_written_as_they_are_read(text: str) -> None:
    group = DeviceGroup.parse(text)
    assert is_device(text)
    assert str(group) == text
    assert group.members == tuple(map(Device.parse, text.split("+")))
    assert group.first == group.members[0]


@pytest.mark.parametrize(
    "text", ["cuda:0+cpu", "auto+auto", "cuda+cuda:1", "cuda:0+", "+", "cpu+", "cpu++cpu", "cuda:0,cuda:1"]
)
def test_ranks_are_on_devices_of_one_kind_that_are_named(text: str) -> None:
    assert not is_device(text)
    with pytest.raises(ValueError, match=rf"^given {re.escape(repr(text))}, allowed: auto, cpu, cuda, cuda:N"):
        DeviceGroup.parse(text)
