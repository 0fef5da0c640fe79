"""A second server does not take the CPUs of the first."""

from __future__ import annotations

from pathlib import Path

import pytest
from tritandem.config import Config
from tritandem.placement import ALLOWED_CPUS_ENV, Plan, another_server_on, plan_here
from tritandem.server import placing
from tritandem.server.options import ServeOptions

from tests.placement.machines import ONE_SOCKET, TWO_CPUS


def process(proc: Path, pid: int, name: str, cpus: str) -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "comm").write_text(f"{name}\n")
    (folder / "status").write_text(f"Name:\t{name}\nCpus_allowed:\tff\nCpus_allowed_list:\t{cpus}\n")


def test_only_a_triton_on_the_same_cpus_counts(tmp_path: Path) -> None:
    process(tmp_path, 10, "python3", "4-7")
    process(tmp_path, 11, "tritonserver", "0-15")
    (tmp_path / "12").mkdir()  # has just ended
    assert not another_server_on({4, 5, 6, 7}, tmp_path)
    process(tmp_path, 13, "tritonserver", "4-7")
    assert another_server_on({4, 5, 6, 7}, tmp_path)


@pytest.fixture
def big_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """What `place_server` plans for is a machine with cores to give away."""
    monkeypatch.setenv(ALLOWED_CPUS_ENV, "0-15")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    root = ONE_SOCKET.lay_out(tmp_path)
    monkeypatch.setattr(placing, "plan_here", lambda config, device=None: plan_here(config, device, root=root))
    return plan_here(Config(), root=root)


@pytest.mark.parametrize(
    ("asked", "alone", "beside"), [("", "", "off"), ("auto", "auto", "off"), ("off", "off", "off")]
)
def test_the_later_server_leaves_its_place_to_the_kernel(
    big_machine: Plan, monkeypatch: pytest.MonkeyPatch, asked: str, alone: str, beside: str
) -> None:
    options = ServeOptions(None, Path(), placement=asked)
    everywhere = frozenset(range(16))
    monkeypatch.setattr(placing, "another_server_on", lambda cpus: False)
    assert placing.place_server(options) == (everywhere if asked == "off" else big_machine.cpus_of("server"), alone)
    monkeypatch.setattr(placing, "another_server_on", lambda cpus: cpus == big_machine.cpus_of("server"))
    assert placing.place_server(options) == (everywhere, beside)


def test_lists_of_the_operators_are_kept_whoever_is_there(big_machine: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placing, "another_server_on", lambda cpus: True)
    options = ServeOptions(None, Path(), placement="server=3 engine=4-5")
    assert placing.place_server(options) == ({3}, "server=3 engine=4-5")


def test_where_nothing_is_given_away_nobody_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED_CPUS_ENV, "0-1")
    root = TWO_CPUS.lay_out(tmp_path)
    monkeypatch.setattr(placing, "plan_here", lambda config, device=None: plan_here(config, device, root=root))
    monkeypatch.setattr(placing, "another_server_on", lambda cpus: pytest.fail("asked"))
    assert placing.place_server(ServeOptions(None, Path())) == ({0, 1}, "")
