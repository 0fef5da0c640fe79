"""Several ranks on GPUs give what one gives; on one GPU they share it. Kernels alone run under the interpreter, too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tritandem.config import EngineConfig
from tritandem.contracts.stream import FinishCode
from tritandem.engine.attention import registry as attention
from tritandem.engine.model.joined import join
from tritandem.engine.model.loader import LoadedModel, inspected, load_model, load_weights
from tritandem.engine.parallel import registry as parallel
from tritandem.engine.parallel.interface import Sizes
from tritandem.engine.service import EngineService

pytest.importorskip("triton")
from tritandem.engine.runners import company, rank_devices, rank_threads, ranks

from tests.added.loop_attention import LoopAttention
from tests.engine.engine_rig import Answer, Rig, prompts, request, tokens_of
from tests.engine.structured_rig import mixture, structure_of, table_walker
from tests.engine.test_cpu_ranks import FEATURES, folder

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
HANG_S = 20.0  # a rank that waits while ranks are built: what is wrong must not take the whole run


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (company, rank_devices, rank_threads, ranks):
        monkeypatch.setattr(module, "LOADING_PATIENCE_S", HANG_S)


def devices(count: int) -> list[torch.device]:
    """GPUs of their own where there are so many, else all the same one."""
    several = torch.cuda.device_count() >= count
    return [torch.device("cuda", index if several else 0) for index in range(count)]


def settings(**config: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "dtype": "float32",
            "num_blocks": 128,
            "max_sequences": 8,
            "prefill_tokens_per_step": 48,
            "rank_patience_s": 10.0,
            **config,
        }
    )


def one(kind: str, **config: Any) -> Any:
    from tritandem.engine.runners.cuda import CudaRunner

    engine = settings(device="cuda:0", **config)
    return CudaRunner(load_model(folder(kind), engine, lambda _: None), engine, lambda _: None)


def several(kind: str, count: int = 2, **config: Any) -> Any:
    return ranks.build_ranks(folder(kind), settings(**config), devices(count), lambda _: None)


def answers(runner: Any, requests: Sequence[Any], structure: Any = None) -> dict[int, Answer]:
    rig = Rig(runner)
    try:
        for asked in requests:
            rig.core.add(asked, 1, None if structure is None else structure(asked))
        found = rig.run(())
        assert not [answer.error for answer in found.values() if answer.error]
        return found
    finally:
        runner.close()


@pytest.mark.parametrize("kind", ["llama", "tied", "biased"])
def test_the_joined_products_of_one_rank_agree_with_the_model_s_own_code(
    kind: str, kernel_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums and gathers over a single rank, on the fused decoder: it compares itself with transformers' modules."""
    if kernel_device.type == "cuda":
        pytest.skip("the loop attention computes on a CPU; whole engines are below")
    from tritandem.engine.model.device_forward import DeviceForward

    config = EngineConfig(dtype="float32")
    [rank] = parallel.make_ranks([CPU])
    model, share = load_weights(folder(kind), config, CPU, lambda _: None, rank)
    assert share is not None
    [exchange] = parallel.make_exchanges([rank], Sizes(64, 64, 64, 132, torch.float32))
    join(model, share, exchange)
    registered = {"loop": lambda shapes, max_rows, device: LoopAttention()}
    monkeypatch.setattr(attention, "BACKENDS", {"cuda": registered})
    loaded: LoadedModel = inspected(model, lambda _: None)
    told: list[str] = []
    forward = DeviceForward(loaded, EngineConfig(), 1, told.append)
    assert forward.fused == (kind != "biased"), told  # an MLP with a bias is not fused


@pytest.mark.parametrize(("kind", "count"), [("llama", 2), ("tied", 2), ("few_kv_heads", 2), ("llama", 4)])
def test_greedy_tokens_are_those_of_one_device(cuda_device: torch.device, kind: str, count: int) -> None:
    asked = [request(i, ids, max_tokens=24) for i, ids in enumerate(prompts(10, seed=3, high=90))]
    runner = several(kind, count)
    assert all(device.forward.fused for device in runner.device.devices)
    assert all(device.captures.captured() > 0 for device in runner.device.devices)
    assert tokens_of(answers(runner, asked)) == tokens_of(answers(one(kind), asked))


def test_bfloat16_tokens_mostly_are_as_well(cuda_device: torch.device) -> None:
    asked = [request(i, ids, max_tokens=6) for i, ids in enumerate(prompts(12, seed=9, high=60))]
    got = tokens_of(answers(several("llama", dtype="bfloat16"), asked))
    want = tokens_of(answers(one("llama", dtype="bfloat16"), asked))
    assert sum(got[i][0] == want[i][0] for i in range(12)) >= 10


@pytest.mark.parametrize("config", [{"compile": False}, {"cuda_graphs": False}])
def test_what_is_not_fused_or_not_captured_runs_too(cuda_device: torch.device, config: dict[str, bool]) -> None:
    asked = [request(i, ids) for i, ids in enumerate(prompts(5, seed=4, high=60))]
    assert tokens_of(answers(several("llama", **config), asked)) == tokens_of(answers(one("llama", **config), asked))


def test_every_sampling_feature_chooses_as_on_one_device(cuda_device: torch.device) -> None:
    asked = [
        request(number * 4 + i, ids, **(options if i else {}))
        for number, options in enumerate(FEATURES.values())
        for i, ids in enumerate(prompts(4, seed=number, high=40))
    ]
    got, want = answers(several("llama"), asked), answers(one("llama"), asked)
    assert tokens_of(got) == tokens_of(want)
    for i, answer in want.items():
        assert got[i].logprobs == pytest.approx(answer.logprobs, abs=1e-3, nan_ok=True)
        assert (got[i].scores is None) == (answer.scores is None)


@pytest.mark.parametrize("structure", [structure_of, table_walker])
def test_structures_hold_on_every_rank(cuda_device: torch.device, structure: Any) -> None:
    asked = mixture(9)
    assert tokens_of(answers(several("llama"), asked, structure)) == tokens_of(answers(one("llama"), asked, structure))


def test_preemption_and_prefix_hits_change_no_token(cuda_device: torch.device) -> None:
    shared = prompts(1, seed=5, low=60, high=61)[0].tolist()
    asked = [request(i, [*shared, *ids], max_tokens=40) for i, ids in enumerate(prompts(8, seed=6, low=1, high=9))]
    want = tokens_of(answers(one("llama"), asked))
    runner = several("llama", num_blocks=26)
    rig = Rig(runner)
    try:
        rig.run(asked[:1])
        found = rig.run(asked[1:])
        assert tokens_of(found) == want
        assert rig.core.load().preemptions > 0
        assert any(answer.cached_tokens for answer in found.values())
    finally:
        runner.close()


def test_blocks_are_as_many_as_the_least_rank_has_room_for(cuda_device: torch.device) -> None:
    runner = several("llama", num_blocks=0, kv_memory_fraction=0.05)
    assert len({device.spec.num_blocks for device in runner.device.devices}) == 1
    runner.close()


@pytest.mark.parametrize(("how", "rank"), [("hangs", 1), ("raises", 0), ("raises", 1)])
def test_a_rank_that_does_not_take_part_ends_every_request_once(
    cuda_device: torch.device, how: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = several("llama", rank_patience_s=1.0)
    reasons: list[str] = []
    runner._ranks.on_broken = reasons.append
    service = EngineService(runner)
    device, steps = runner.device.devices[rank], 0
    run = device.run

    def breaking(*args: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps < 20:
            return run(*args)
        if how == "raises":
            raise RuntimeError("a launch went wrong")
        return []  # launched nothing: the others wait

    monkeypatch.setattr(device, "run", breaking)
    try:
        asked = [request(i, ids, max_tokens=100) for i, ids in enumerate(prompts(6, seed=3))]
        assert service.submit(asked) == [None] * 6
        ends: dict[int, FinishCode] = {}
        until = time.monotonic() + HANG_S
        while len(ends) < 6 and time.monotonic() < until:
            batch = service.next_batch(0.1)
            for row, seq_id in enumerate([] if batch is None else batch.seq_ids.tolist()):
                assert seq_id not in ends, "a row after the last one"
                if batch is not None and batch.finish[row] != FinishCode.RUNNING:
                    ends[seq_id] = FinishCode(batch.finish[row])
        assert set(ends.values()) == {FinishCode.ERROR}
        assert len(ends) == 6
        assert len(reasons) == 1
    finally:
        service.close()
