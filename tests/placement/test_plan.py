"""Who runs where on which machine: nothing is pinned that could be trapped, nobody computes with more than it has."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tritandem.config import Config, PlacementConfig, placement_from_words
from tritandem.contracts.errors import ConfigError
from tritandem.machine.cpu_list import format_cpus, parse_cpus
from tritandem.machine.device import Device
from tritandem.machine.topology import read_topology
from tritandem.placement import ALLOWED_CPUS_ENV, COMPONENTS, Plan, make_plan, plan_here
from tritandem.placement.here import gpu_of

from tests.placement.machines import EIGHT_GPUS, NEIGHBOURS, ONE_SOCKET, TWO_CPUS, TWO_SOCKETS, Machine

EVERY = "0-255"


def planned(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine: Machine,
    *,
    device: str = "auto",
    words: str = "auto",
    allowed: str = EVERY,
    visible: str | None = None,
) -> Plan:
    monkeypatch.setenv(ALLOWED_CPUS_ENV, allowed)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = Config(placement=placement_from_words(words))
    return plan_here(config, Device.parse(device), root=machine.lay_out(root))


def cpus(plan: Plan) -> dict[str, str]:
    return {name: format_cpus(plan.shares[name].cpus) for name in COMPONENTS}


def threads(plan: Plan) -> dict[str, int]:
    return {name: plan.shares[name].threads for name in COMPONENTS}


UNPINNED = dict.fromkeys(COMPONENTS, "")


def test_two_cpus_are_left_to_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, monkeypatch, TWO_CPUS)
    assert cpus(plan) == UNPINNED
    assert threads(plan) == {"engine": 1, "engine_host": 1, "scheduler": 1, "tokenizer": 2, "server": 1}
    assert plan.describe("engine") == "anywhere on CPUs 0-1, 1 compute thread (2 cores: too few to give any away)"


def test_one_socket_with_a_gpu_gives_the_launching_thread_a_core_with_its_sibling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path, monkeypatch, ONE_SOCKET)
    assert cpus(plan) == {
        "engine_host": "0,8",
        "engine": "1,9",
        "scheduler": "2-7,10-15",  # two cores that nobody else has, and those of tokenizer and server
        "tokenizer": "4-7,12-15",
        "server": "4-7,12-15",
    }
    assert threads(plan) == {"engine": 1, "engine_host": 1, "scheduler": 1, "tokenizer": 4, "server": 1}


def test_two_sockets_stay_on_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, monkeypatch, TWO_SOCKETS)
    assert cpus(plan) == {
        "engine_host": "12,36",
        "engine": "13,37",
        "scheduler": "14-23,38-47",
        "tokenizer": "16-23,40-47",
        "server": "16-23,40-47",
    }
    assert format_cpus(plan.home) == "12-23,36-47"
    assert "NUMA node 1 of GPU 0000:b1:00.0" in plan.reason


def test_an_engine_on_the_cpu_computes_with_one_thread_a_core_of_one_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path, monkeypatch, TWO_SOCKETS, device="cpu")
    assert cpus(plan) == {
        "engine": "3-11,27-35",
        "engine_host": "3-11,27-35",
        "scheduler": "0-2,24-26",
        "tokenizer": "0-2,24-26",
        "server": "0-2,24-26",
    }
    assert threads(plan) == {"engine": 9, "engine_host": 9, "scheduler": 1, "tokenizer": 3, "server": 1}


def test_a_quota_says_that_others_use_these_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(NEIGHBOURS, quota="450000 100000")
    plan = planned(tmp_path, monkeypatch, machine)
    assert cpus(plan) == UNPINNED
    assert threads(plan) == {"engine": 3, "engine_host": 3, "scheduler": 1, "tokenizer": 4, "server": 1}


def test_under_a_quota_a_server_still_stays_on_its_gpus_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, monkeypatch, replace(TWO_SOCKETS, quota="600000 100000"))
    assert cpus(plan) == dict.fromkeys(COMPONENTS, "12-23,36-47")
    assert threads(plan)["tokenizer"] == 6


def test_servers_of_eight_gpus_share_the_cores_out_without_asking_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homes = []
    for number in range(8):
        plan = planned(tmp_path, monkeypatch, EIGHT_GPUS, visible=str(number))
        assert len(plan.home) == 24
        node = {cpu // 48 % 2 for cpu in plan.home}
        assert node == {number // 4}
        homes.append(plan.home)
    assert len(frozenset().union(*homes)) == sum(len(home) for home in homes)


def test_engines_of_one_server_take_their_own_gpus_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = planned(tmp_path, monkeypatch, EIGHT_GPUS, device="cuda:0", visible="6,7")
    second = planned(tmp_path, monkeypatch, EIGHT_GPUS, device="cuda:1", visible="6,7")
    assert not first.home & second.home
    assert cpus(first)["engine_host"] == "72,168"
    assert cpus(second)["engine_host"] == "84,180"


def test_cpus_that_were_given_to_this_server_are_not_shared_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path, monkeypatch, EIGHT_GPUS, visible="6", allowed="48-57,144-153")
    assert format_cpus(plan.home) == "48-57,144-153"
    assert cpus(plan)["engine_host"] == "48,144"


def test_a_gpu_that_cannot_be_told_from_others_gets_no_cores_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path, monkeypatch, EIGHT_GPUS, visible="GPU-8d3c0f5e")
    assert len({share.cpus for share in plan.shares.values()}) == 1
    assert "which of 8 GPUs" in plan.reason


def test_cores_on_a_far_node_are_used_when_the_gpus_node_has_too_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path, monkeypatch, TWO_SOCKETS, allowed="0-5,12-15")
    assert format_cpus(plan.home) == "0-5,12-15"
    assert cpus(plan)["engine_host"] == "12"


def test_an_empty_list_of_visible_devices_means_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, monkeypatch, ONE_SOCKET, visible="")
    assert plan.shares["engine"].threads == 5


@pytest.mark.parametrize("machine", [TWO_CPUS, ONE_SOCKET, TWO_SOCKETS, EIGHT_GPUS, NEIGHBOURS])
@pytest.mark.parametrize("quota", [None, 1.0, 3.5])
def test_whatever_the_machine_every_plan_holds_together(tmp_path: Path, machine: Machine, quota: float | None) -> None:
    root = machine.lay_out(tmp_path)
    for allowed in (EVERY, "0", "0-1", "0-6", "0-9", "1-30,40-90"):
        topology = replace(read_topology(parse_cpus(allowed), root), quota_cores=quota)
        for gpu in (None, *topology.gpus):
            for on_gpu in {gpu is not None, True}:
                plan = make_plan(topology, PlacementConfig(), gpu, on_gpu)
                for name, share in plan.shares.items():
                    assert plan.cpus_of(name), name
                    assert plan.cpus_of(name) <= plan.home, name
                    assert 1 <= share.threads <= min(len(plan.cpus_of(name)), max(1, quota or 256)), name
                pinned = {share.cpus for name, share in plan.shares.items() if name != "scheduler"}
                assert all(one == other or not one & other for one in pinned for other in pinned)
                engine, scheduler = plan.shares["engine_host"].cpus, plan.shares["scheduler"].cpus
                assert engine == scheduler or not engine & scheduler, "somebody comes near the launching thread"
                assert plan.shares["tokenizer"].cpus <= scheduler


def test_lists_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, monkeypatch, ONE_SOCKET, words="engine=0-1,8 engine_host=1 tokenizer=3-7")
    assert cpus(plan) == {"engine": "0-1,8", "engine_host": "1", "scheduler": "", "tokenizer": "3-7", "server": ""}
    assert threads(plan)["tokenizer"] == 5
    assert format_cpus(plan.cpus_of("scheduler")) == "0-15"


def test_an_engine_on_the_cpu_has_a_thread_for_each_core_of_its_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(tmp_path, monkeypatch, ONE_SOCKET, device="cpu", words="engine=0-3,8-11")
    assert threads(plan)["engine"] == 4
    assert cpus(plan)["engine_host"] == "0-3,8-11"


def test_off_leaves_everything_to_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(tmp_path, monkeypatch, TWO_SOCKETS, words="off")
    assert cpus(plan) == UNPINNED
    assert format_cpus(plan.home) == "0-47"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PlacementConfig("auto", engine="1"), "placement.engine: given '1', allowed: a list only with policy"),
        (PlacementConfig("explicit", scheduler="1-x"), "placement.scheduler: given '1-x', allowed: a list of CPUs"),
        (PlacementConfig("explicit", server="1,16"), "placement.server: given '1,16', allowed: CPUs among 0-15"),
        (
            PlacementConfig("explicit", engine_host="1"),
            "placement.engine_host: given '1', allowed: nothing for an engine",
        ),
    ],
)
def test_a_wrong_placement_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: PlacementConfig, message: str
) -> None:
    monkeypatch.setenv(ALLOWED_CPUS_ENV, EVERY)
    with pytest.raises(ConfigError) as refused:
        plan_here(Config(placement=config), Device("cpu"), root=ONE_SOCKET.lay_out(tmp_path))
    assert str(refused.value).startswith(message)


@pytest.mark.parametrize("words", ["engine", "on", "engine=1 engine=2", "policy=off", "gpu=1"])
def test_words_that_say_nothing_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match="placement"):
        placement_from_words(words)


def test_cuda_counts_as_the_kernel_does(tmp_path: Path) -> None:
    topology = read_topology(frozenset(range(192)), EIGHT_GPUS.lay_out(tmp_path))
    for device, visible, address in [
        ("cuda", None, "0000:19:00.0"),
        ("auto", "5", "0000:bb:00.0"),
        ("cuda:1", "5, 2", "0000:4c:00.0"),
    ]:
        gpu = gpu_of(Device.parse(device), topology, {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
        assert gpu is not None
        assert gpu.address == address
    assert gpu_of(Device("cuda", 8), topology, {}) is None
    assert gpu_of(Device("cuda", 1), topology, {"CUDA_VISIBLE_DEVICES": "0"}) is None
