"""Structured answers on CUDA: the host writes masks while the forward runs, and nobody waits for ever."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from tritandem.contracts.stream import FinishCode
from tritandem.engine.host.masks import MaskServer
from tritandem.engine.step import MASKED, STRUCTURED, PrefillChunk, SamplingFeatures, SlotInit, StepPlan

from tests.engine.engine_rig import Rig, prompts, request, tokens_of
from tests.engine.structured_rig import check, mixture, regex, run, structure_of, structured, table_walker
from tests.engine.test_forced_tokens import EVERYWHERE, WITHOUT, answered, ends, fixed
from tests.engine_cuda.test_cuda_engine import FEATURES, cuda_runner, loaded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("config", [{}, {"graph_capture": "start"}, {"cuda_graphs": False}], ids=str)
@pytest.mark.parametrize("ahead", [1, 3])
def test_answers_match_their_expressions_and_others_are_as_ever(
    cuda_device: torch.device, config: dict[str, Any], ahead: int
) -> None:
    requests = mixture(24)
    runner = cuda_runner(launch_ahead_steps=ahead, **config)
    answers = run(runner, requests)
    runner.close()
    check(requests, answers)
    assert {answer.finish for answer in answers.values()} >= {FinishCode.STOP, FinishCode.COMPLETE}
    alone = cuda_runner(**config)
    assert tokens_of(run(alone, requests[::3])) == {i: answers[i].tokens for i in range(0, 24, 3)}
    alone.close()


@pytest.mark.parametrize("name", sorted(FEATURES))
def test_with_every_other_feature_tokens_equal_those_of_the_cpu(
    cuda_device: torch.device, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    from tritandem.config import EngineConfig
    from tritandem.engine.runners.cpu import CpuRunner

    options = {key: value for key, value in FEATURES[name].items() if key != "allowed_token_ids"}
    texts = prompts(6, seed=8)
    requests = [
        structured(i, ids, regex(r"[a-z0-9]{4,20}"), **options) if i % 2 else request(i, ids, **options)
        for i, ids in enumerate(texts)
    ]
    runner = cuda_runner()
    got = run(runner, requests)
    runner.close()
    cpu = CpuRunner(loaded("llama", "cpu"), EngineConfig(num_blocks=128, max_sequences=8))
    want = run(cpu, requests)
    if "stop_ids" not in options:  # others than the end token stop an answer anywhere
        check(requests, got)
    assert tokens_of(got) == tokens_of(want)
    assert [got[i].finish for i in got] == [want[i].finish for i in got]
    assert [got[i].top_ids for i in got] == [want[i].top_ids for i in got]
    assert "it runs eagerly" not in caplog.text  # a choice that cannot be captured would wait for the host twice


@pytest.mark.parametrize("config", [{}, {"graph_capture": "start"}, {"cuda_graphs": False}], ids=str)
def test_answers_by_tables_equal_those_by_masks(cuda_device: torch.device, config: dict[str, Any]) -> None:
    requests = mixture(24)
    tabled, masked = cuda_runner(**config), cuda_runner(**config)
    by_tables = run(tabled, requests, table_walker)
    check(requests, by_tables)
    assert tokens_of(by_tables) == tokens_of(run(masked, requests))
    assert tabled.device.masks_ready[0] == 0  # no step waited for the host
    tabled.close()
    masked.close()


def test_tables_masks_and_free_rows_in_one_batch(cuda_device: torch.device) -> None:
    requests = mixture(24)
    runner, masked = cuda_runner(num_blocks=40), cuda_runner()
    both = run(runner, requests, lambda one: (table_walker if one.seq_id % 2 else structure_of)(one))
    check(requests, both)
    assert tokens_of(both) == tokens_of(run(masked, requests))
    runner.close()
    masked.close()


@pytest.mark.parametrize("kind", ["gemma2", "gpt2"])
def test_models_that_run_launch_by_launch_wait_for_masks_as_well(cuda_device: torch.device, kind: str) -> None:
    requests = mixture(9)
    runner = cuda_runner(kind)
    check(requests, run(runner, requests))
    runner.close()


def test_a_preempted_answer_goes_on_where_its_structure_stood(cuda_device: torch.device) -> None:
    requests = mixture(18)
    plenty, few = cuda_runner(), cuda_runner(num_blocks=14)
    want = run(plenty, requests)
    rig = Rig(few)
    for one in requests:
        rig.core.add(one, 1, structure_of(one))
    assert tokens_of(rig.run(())) == tokens_of(want)
    assert rig.core.load().preemptions > 0
    plenty.close()
    few.close()


def test_a_steady_step_without_structure_replays_the_graph_that_it_always_did(cuda_device: torch.device) -> None:
    runner = cuda_runner()
    before = runner.device.captures.captured()
    run(runner, [request(i, ids) for i, ids in enumerate(prompts(5))])
    assert runner.device.captures.captured() == before
    assert runner.device.masks_ready[0] == 0
    runner.close()


def test_masks_that_nobody_writes_fail_their_rows_and_no_others(
    cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tritandem.engine.runners import decode_step

    monkeypatch.setattr(decode_step, "_MOST_POLLS", 20_000)

    def lost(server: MaskServer, oldest: int, running: Any) -> list[Any]:
        server._waiting = None
        return []

    monkeypatch.setattr(MaskServer, "serve", lost)
    others = [request(i, ids, max_tokens=12) for i, ids in enumerate(prompts(3), start=10)]
    runner = cuda_runner()
    answers = run(runner, [structured(1, [5, 6, 7], regex("[ab]{30}"), max_tokens=40), *others])
    runner.close()
    assert answers[1].finish == FinishCode.ERROR
    plain = cuda_runner()
    assert tokens_of(run(plain, others)) == {i: answers[i].tokens for i in (10, 11, 12)}
    plain.close()


@pytest.mark.parametrize("structure", [structure_of, table_walker])
@pytest.mark.parametrize("ahead", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_forced_tokens_change_no_answer_and_save_steps(
    cuda_device: torch.device, structure: Any, ahead: int, temperature: float
) -> None:
    requests = fixed(temperature=temperature)
    one = [next(request for request in requests if request.grammar)]
    runner = cuda_runner(launch_ahead_steps=ahead)
    with_runs, without, few, many = (
        answered(runner, asked, forcing, structure) for asked in (requests, one) for forcing in (EVERYWHERE, WITHOUT)
    )
    runner.close()
    assert ends(with_runs.answers) == ends(without.answers)
    assert few.core.load().steps < many.core.load().steps - 4


def launch_without_masks(runner: Any) -> None:
    sampling, nothing = request(1, [1]).sampling, np.zeros(0, np.int32)
    init = SlotInit(0, np.array([1, 2], np.int32), sampling, (), (), nothing, structure=MASKED)
    features = SamplingFeatures(frozenset({STRUCTURED}))
    chunk = PrefillChunk(0, 0, np.array([1, 2], np.int32), True)
    blocks = np.array([[0, 0, 1]], np.int32)
    runner.launch(StepPlan(1, inits=[init], block_updates=blocks, prefill=[chunk], features=features))
    assert runner.busy()


def soon(call: Any) -> None:
    """It returns in far less than a kernel waits by itself."""
    calling = threading.Thread(target=call)
    calling.start()
    calling.join(2.0)
    assert not calling.is_alive()


def test_closing_lets_a_waiting_step_go(cuda_device: torch.device) -> None:
    runner = cuda_runner()
    launch_without_masks(runner)
    soon(runner.close)


def test_a_launch_that_failed_leaves_nothing_waiting(cuda_device: torch.device) -> None:
    runner = cuda_runner()
    launch_without_masks(runner)
    soon(runner._recover)
    assert runner.device.masks_ready[0] == runner._record == 1
    runner.close()
