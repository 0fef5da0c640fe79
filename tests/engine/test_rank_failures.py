"""A rank that raises or hangs ends the engine soon, every request once; who comes later is told at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tritandem.contracts.stream import FinishCode
from tritandem.engine.runners.cpu_ranks import CpuRanks
from tritandem.engine.service import EngineService

from tests.engine.engine_rig import prompts, request
from tests.engine.test_cpu_ranks import make_ranks_runner

WAIT_S = 30.0


class Breaking:
    """A forward that does as it is told once it has run so many passes."""

    def __init__(self, inner: Any, passes: int, then: Callable[[], object]) -> None:
        self.inner, self.cache, self.left, self.then = inner, inner.cache, passes, then

    def logits(self, *args: Any) -> torch.Tensor:
        self.left -= 1
        if self.left < 0:
            self.then()
        out: torch.Tensor = self.inner.logits(*args)
        return out


def fail() -> None:
    raise RuntimeError("a kernel went wrong")


@pytest.mark.parametrize("how", ["raises", "hangs"])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_request_ends_once_and_the_engine_says_why(how: str, rank: int) -> None:
    freed = threading.Event()
    runner: CpuRanks = make_ranks_runner("llama", 2, rank_patience_s=1.0)
    part: Any = runner._runners[rank]
    part._forward = Breaking(part._forward, 4, fail if how == "raises" else freed.wait)
    reasons: list[str] = []
    broken = threading.Event()

    def on_broken(reason: str) -> None:
        reasons.append(reason)
        broken.set()

    runner._ranks.on_broken = on_broken
    service = EngineService(runner)
    try:
        asked = [request(i, ids, max_tokens=200) for i, ids in enumerate(prompts(6, seed=3))]
        assert service.submit(asked) == [None] * 6
        ends: dict[int, FinishCode] = {}
        errors: list[str] = []
        until = time.monotonic() + WAIT_S
        while len(ends) < 6:
            assert time.monotonic() < until, "a request did not end"
            batch = service.next_batch(0.1)
            for row, seq_id in enumerate([] if batch is None else batch.seq_ids.tolist()):
                assert seq_id not in ends, "a row after the last one"
                if batch is not None and batch.finish[row] != FinishCode.RUNNING:
                    ends[seq_id] = FinishCode(batch.finish[row])
                    errors.append(batch.errors[row])
        assert set(ends.values()) == {FinishCode.ERROR}
        said = f"rank {1 - rank} waited 1 s for the others"
        if how == "raises":
            said = f"rank {rank}: StepFailed: a kernel went wrong"
        assert broken.wait(WAIT_S)
        assert all(said in error for error in [*errors, *reasons])
        assert service.submit([request(9, [1, 2])]) == [None], "and whoever comes now ends at once"
        last = service.next_batch(WAIT_S)
        assert last is not None
        assert (last.seq_ids.tolist(), last.finish.tolist()) == ([9], [FinishCode.ERROR])
        assert said in last.errors[0]
        assert len(reasons) == 1
    finally:
        freed.set()
        service.close()


def test_threads_of_ranks_end_with_the_runner() -> None:
    runner = make_ranks_runner("llama", 2)
    runner.close()
    assert not any(thread.is_alive() for thread in runner._ranks._threads)
