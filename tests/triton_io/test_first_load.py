"""The first answer of any engine is enough, and one that hangs holds up the others for a moment at most."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
from tritandem.contracts.errors import EngineFailed
from tritandem.contracts.stream import LoadSnapshot
from tritandem.triton_io.hops.first_load import FirstLoad

LOAD = LoadSnapshot(max_context_tokens=77)


class Engine:
    """Only `load` is used. Hangs, fails or answers."""

    def __init__(self, name: str, failure: EngineFailed | None = None) -> None:
        self.name, self.failure = name, failure
        self.hangs = threading.Event()
        self.hangs.set()
        self.asked = 0

    def load(self) -> LoadSnapshot:
        self.asked += 1
        assert self.hangs.wait(30)
        if self.failure is not None:
            raise self.failure
        return LOAD


@pytest.fixture
def stuck() -> Iterator[Engine]:
    engine = Engine("stuck")
    engine.hangs.clear()
    yield engine
    engine.hangs.set()


def test_an_engine_that_hangs_or_fails_is_passed_over(stuck: Engine) -> None:
    dead, sound = Engine("dead", EngineFailed("dead: gone")), Engine("sound")
    assert FirstLoad([stuck, dead, sound], 0.05)() == LOAD  # type: ignore[list-item]


def test_an_engine_that_hangs_is_asked_once_and_waited_for_once(stuck: Engine) -> None:
    first_load = FirstLoad([stuck], 0.2)  # type: ignore[list-item]
    for _ in range(3):
        with pytest.raises(EngineFailed, match=r"stuck: no answer to a call for 0\.2 s"):
            first_load()
    begun_s = time.monotonic()
    for _ in range(100):
        with pytest.raises(EngineFailed):
            first_load()
    assert time.monotonic() - begun_s < 10  # 100 waits would be 20 s
    assert stuck.asked == 1
    stuck.hangs.set()
    while stuck.asked == 1:  # its late answer is taken, or it is asked again
        try:
            assert first_load() == LOAD
            break
        except EngineFailed:
            assert time.monotonic() - begun_s < 20


def test_without_an_answer_the_last_failure_counts_and_all_are_asked_again() -> None:
    engines = [Engine("a", EngineFailed("a: gone")), Engine("b", EngineFailed("b: gone"))]
    first_load = FirstLoad(engines, 5.0)  # type: ignore[arg-type]
    for asked in (1, 2):
        with pytest.raises(EngineFailed, match="b: gone"):
            first_load()
        assert [engine.asked for engine in engines] == [asked, asked]
    with pytest.raises(EngineFailed, match="no engine is configured"):
        FirstLoad([], 5.0)()
