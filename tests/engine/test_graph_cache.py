"""When something is rehearsed, run, captured and replayed; what cannot be captured runs. On a CUDA of a few lines."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tritandem.engine.runners import graphs
from tritandem.engine.runners.graphs import GraphCache


class Recorder:
    """Work that says what became of it; `graph` is the one that is being captured."""

    def __init__(self) -> None:
        self.graph: FakeGraph | None = None
        self.done: list[str] = []
        self.broken = False

    def work(self, rehearsal: bool) -> None:
        if self.graph is not None:
            assert not rehearsal
            if self.broken:
                raise RuntimeError("operation not permitted when stream is capturing")
        self.done.append("rehearsed" if rehearsal else "captured" if self.graph else "run")


class FakeGraph:
    recorder: Recorder

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self.pools.append(pool)
        self.recorder.graph = self

    def capture_end(self) -> None:
        self.recorder.graph = None

    def pool(self) -> tuple[int, int]:
        return (0, 1)

    def replay(self) -> None:
        self.recorder.done.append("replayed")

    pools: list[Any]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    made = Recorder()
    FakeGraph.recorder, FakeGraph.pools = made, []
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: made.done.append("gave back"))
    monkeypatch.setattr(graphs, "MOST_MISSED", 3)
    yield made
    assert made.graph is None, "a capture was left open"


def cache(enabled: bool = True) -> GraphCache:
    return GraphCache(SimpleNamespace(device="none"), enabled)  # type: ignore[arg-type]


def step(graphs: GraphCache, recorder: Recorder) -> None:
    graphs.prepare("a", recorder.work)
    graphs.run("a", recorder.work)


def test_a_first_use_is_rehearsed_and_run_and_leaves_word(recorder: Recorder) -> None:
    graphs = cache()
    step(graphs, recorder)
    step(graphs, recorder)
    graphs.run("b", recorder.work)
    assert recorder.done == ["rehearsed", "run", "run", "rehearsed", "run"]
    assert graphs.missed == {"a": 2, "b": 1}


def test_what_was_captured_is_replayed_and_missed_no_more(recorder: Recorder) -> None:
    graphs = cache()
    graphs.run("a", recorder.work)
    recorder.done.clear()
    assert graphs.capture("a", recorder.work)
    assert graphs.capture("b", recorder.work)
    graphs.run("a", recorder.work)
    graphs.prepare("a", recorder.work)
    assert recorder.done == ["rehearsed", "gave back", "captured", "rehearsed", "captured", "replayed"]
    assert FakeGraph.pools == [None, (0, 1)]
    assert graphs.missed == {}
    assert graphs.captured() == 2


def test_what_runs_eagerly_again_and_again_is_captured_in_place(recorder: Recorder) -> None:
    graphs = cache()
    for _ in range(5):
        step(graphs, recorder)
    assert recorder.done == ["rehearsed", "run", "run", "run", "gave back", "captured", "replayed", "replayed"]


def test_beside_other_ranks_nothing_is_captured_between_steps(recorder: Recorder) -> None:
    graphs = GraphCache(SimpleNamespace(device="none"), True, between_steps=False)  # type: ignore[arg-type]
    for _ in range(8):
        step(graphs, recorder)
    assert recorder.done == ["rehearsed", *["run"] * 8]
    assert graphs.capture("a", recorder.work)


def test_a_refusal_is_final_and_costs_nothing_but_speed(recorder: Recorder) -> None:
    graphs = cache()
    recorder.broken = True
    assert not graphs.capture("a", recorder.work)
    recorder.done.clear()
    for _ in range(8):
        step(graphs, recorder)
    assert set(recorder.done) == {"rehearsed", "run"}
    assert recorder.done.count("run") == 8
    assert not graphs.capture("a", recorder.work)


def test_without_graphs_everything_runs(recorder: Recorder) -> None:
    graphs = cache(enabled=False)
    for _ in range(5):
        step(graphs, recorder)
    assert recorder.done == ["rehearsed", *["run"] * 5]
    assert not graphs.capture("a", recorder.work)
