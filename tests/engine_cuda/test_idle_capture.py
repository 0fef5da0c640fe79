"""Graphs that are captured in idle moments change no token; none is captured while sequences live; and whoever comes
right after the start waits for no compiler."""

from __future__ import annotations

import dataclasses
import itertools
import threading
import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tritandem.contracts.stream import FinishCode
from tritandem.engine.kernels_ahead import KernelsAhead
from tritandem.engine.service import EngineService

from tests.engine.engine_rig import Rig, prompts, request, tokens_of
from tests.engine_cuda.test_cuda_engine import FEATURES, answers, cuda_runner

pytestmark = pytest.mark.gpu

MIXTURE = list(FEATURES.values())
NEVER = 1 << 30


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often something runs eagerly, it is captured in idle moments only."""
    from tritandem.engine.runners import graphs

    monkeypatch.setattr(graphs, "MOST_MISSED", NEVER)


def mixture(count: int, seed: int, first_id: int = 0) -> list[Any]:
    texts = prompts(count, seed=seed, high=60)
    return [request(first_id + i, ids, **MIXTURE[i % len(MIXTURE)]) for i, ids in enumerate(texts)]


@pytest.mark.usefixtures("patient")
def test_tokens_are_the_same_before_between_and_after_idle_captures(cuda_device: torch.device) -> None:
    """The cache of prefixes is warm in the later rounds: an idle capture writes to no block of anybody's."""
    requests = mixture(24, seed=3)
    want = tokens_of(answers(cuda_runner(cuda_graphs=False), requests))
    runner = cuda_runner()
    rig = Rig(runner)
    for number in range(4):
        mine = [dataclasses.replace(one, seq_id=one.seq_id + 100 * number) for one in requests]
        got = tokens_of(rig.run(mine))
        assert {i: got[i + 100 * number] for i in want} == want, f"round {number}"
        for _ in itertools.takewhile(lambda _: rig.core.prepare(), range(5 if number < 2 else 1000)):
            pass
    assert not rig.core.prepare()
    before = runner.device.captures.captured()
    again = [dataclasses.replace(one, seq_id=one.seq_id + 900) for one in requests]
    assert {i - 900: tokens for i, tokens in tokens_of(rig.run(again)).items() if i >= 900} == want
    assert runner.device.captures.captured() == before
    runner.close()


@pytest.mark.usefixtures("patient")
def test_nothing_is_captured_while_sequences_live(cuda_device: torch.device) -> None:
    runner = cuda_runner()
    captures = runner.device.captures
    rig, before = Rig(runner), captures.captured()
    rig.add(*mixture(24, seed=4))
    while not rig.core.idle():
        rig.step()
        assert captures.captured() == before
    assert captures.missed
    while rig.core.prepare():
        pass
    assert captures.captured() > before
    runner.close()


def test_an_engine_that_is_never_idle_captures_what_it_keeps_running_eagerly(
    cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tritandem.engine.runners import graphs

    requests = mixture(24, seed=5)
    want = tokens_of(answers(cuda_runner(cuda_graphs=False), requests))
    monkeypatch.setattr(graphs, "MOST_MISSED", 3)
    runner = cuda_runner()
    before = runner.device.captures.captured()
    assert tokens_of(Rig(runner).run(requests)) == want
    assert runner.device.captures.captured() > before
    runner.close()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("config", [{}, {"max_sequences": 40}], ids=str)
def test_a_request_right_after_the_start_compiles_and_captures_nothing(
    cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any]
) -> None:
    import triton

    runner = cuda_runner(dtype=torch.bfloat16, **config)
    compiled: list[str] = []
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.fn.__name__), raising=False
    )
    before = runner.device.captures.captured()
    ways = [{}, {"temperature": 0.8, "seed": 2}, {"temperature": 1.1, "top_p": 0.9, "top_k": 30, "seed": 3}]
    texts = prompts(12, seed=6, low=1, high=70)
    got = Rig(runner).run([request(i, ids, **ways[i % 3]) for i, ids in enumerate(texts)])
    assert {answer.finish for answer in got.values()} <= {FinishCode.LENGTH, FinishCode.STOP}
    assert compiled == []
    assert runner.device.captures.captured() == before
    runner.close()


def test_kernels_that_were_walked_through_are_compiled_by_many_threads_and_give_what_others_give(
    cuda_device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    import triton

    threads: set[str] = set()
    monkeypatch.setattr(
        triton.knobs.compilation, "listener", lambda **_: threads.add(threading.current_thread().name), raising=False
    )
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # A head size of its own: what another test compiled is not compiled again in this process.
    runner = cuda_runner("qwen3", dtype=torch.bfloat16, max_sequences=24)
    assert any(name.startswith("kernels") for name in threads)
    requests = [request(i, ids) for i, ids in enumerate(prompts(8, seed=7))]
    ahead = tokens_of(answers(runner, requests))
    monkeypatch.setattr(KernelsAhead, "walking", lambda self: nullcontext(False))
    assert tokens_of(answers(cuda_runner("qwen3", dtype=torch.bfloat16, max_sequences=24), requests)) == ahead


def test_a_service_without_work_captures_the_rest_by_itself(cuda_device: torch.device) -> None:
    runner = cuda_runner(max_sequences=24)
    service = EngineService(runner)
    assert runner.sizes.unasked()
    deadline_s = time.monotonic() + 60.0
    while runner.sizes.unasked():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    service.submit([request(1, range(9), max_tokens=5)])
    tokens = 0
    while service.live():
        batch = service.next_batch(10.0)
        assert batch is not None
        tokens += int(batch.token_counts.sum())
    assert tokens == 5
    service.close()
