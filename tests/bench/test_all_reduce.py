"""The benchmark of what ranks say to each other runs without a GPU, and says what it measured."""

from __future__ import annotations

import json

import pytest
from tritandem_bench.all_reduce import main, torch_devices


def test_ranks_that_are_threads_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--devices", "cpu+cpu+cpu", "--rows", "1,8", "--width", "64", "--calls", "4"])
    *shown, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert document["devices"] == ["cpu"] * 3
    assert set(document["rows"]) == {"1", "8"}
    assert all(row["us"] > 0 for row in document["rows"].values())
    assert shown[0].split() == ["rows", "1", "8"]


@pytest.mark.parametrize("devices", ["cpu", "cpu+cuda:0", "auto+auto", "gpu+gpu", ""])
def test_devices_that_are_no_group_are_refused(devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--devices", devices])
    assert "given" in capsys.readouterr().err


def test_two_ranks_may_share_a_device() -> None:
    assert [str(device) for device in torch_devices("cuda:0+cuda:0")] == ["cuda:0", "cuda:0"]
