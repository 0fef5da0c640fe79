"""The one command for several GPUs: its parts are programs that there are, and a trial of it runs without a GPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from tritandem_bench.several_gpus import KINDS, Part, lines, main, parts, run


@pytest.mark.parametrize("devices", ["cpu+cpu", "cuda:0+cuda:0", "cuda:0+cuda:1+cuda:2+cuda:3"])
def test_every_part_is_a_program_with_a_time_limit(devices: str) -> None:
    found = list(parts(devices, Path("model"), 10))
    assert {part.kind for part in found} <= set(KINDS)
    assert len({part.name for part in found}) == len(found)
    for part in found:
        assert importlib.util.find_spec(f"tritandem_bench.{part.program}")
        assert part.limit_s > 0


def test_nccl_is_compared_where_every_rank_has_a_gpu() -> None:
    assert not any(part.kind == "nccl" for part in parts("cuda:0+cuda:0", None, 10))
    assert any(part.kind == "nccl" for part in parts("cuda:0+cuda:1", None, 10))


def test_a_trial_measures_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--devices", "cpu+cpu", "--only", "links,sums"])
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert document["links"] == []
    assert document["sums, 4,096 wide"]["rows"]["8"]["us"] > 0


def test_a_part_that_fails_says_so_and_the_next_one_runs() -> None:
    broken = Part("sums", "broken", "handoff", ("--rows", "none"), 60)
    found = run(broken)
    assert "none" in found["failed"]
    assert "FAILED" in "".join(lines(broken, found))
    slow = Part("sums", "slow", "handoff", (), 0.01)
    assert "not done after" in run(slow)["failed"]


def test_a_kind_that_is_unknown_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "everything"])
    assert "given 'everything', allowed: links" in capsys.readouterr().err
