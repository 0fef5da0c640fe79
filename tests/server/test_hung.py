"""Which process of a server hangs, given what was seen of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tritandem.config import WatchConfig
from tritandem.server.hung import HungWatch, Sign

LIMITS = WatchConfig(stopped_s=2.0, silent_s=15.0)


class Server:
    """Looks at one process every quarter of a second; it beats at every second look as long as it can."""

    def __init__(self) -> None:
        self.now_s, self.waited_s, self.looks = 100.0, 7.0, 0
        self.watch = HungWatch(LIMITS, lambda pid: self.waited_s)

    def look(
        self,
        *,
        stopped: bool = False,
        beats: bool = True,
        hangs: str = "",
        passed_s: float = 0.25,
        waited_s: float = 0.0,
        pid: int = 5,
    ) -> str:
        self.now_s += passed_s
        self.waited_s += waited_s
        self.looks += beats
        return self.watch.look({pid: Sign("engine", stopped, (self.looks // 2, hangs))}, self.now_s).get(pid, "")


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    for _ in range(4):
        assert server.look() == ""
    return server


def seconds_until_hung(server: Server, most_s: float = 600.0, **seen: object) -> float:
    begun_s = server.now_s
    while server.now_s - begun_s < most_s:
        if server.look(**seen):
            return server.now_s - begun_s
    return most_s


def test_a_stopped_process_hangs_after_two_seconds(server: Server) -> None:
    assert 2.0 < seconds_until_hung(server, stopped=True, beats=False) <= 3.0
    assert server.look(stopped=True, beats=False) == "engine has been stopped by a signal"


def test_one_that_goes_on_in_time_does_not(server: Server) -> None:
    for _ in range(20):
        for _ in range(7):
            assert server.look(stopped=True, beats=False) == ""
        assert server.look() == ""


def test_silence_is_a_hang_and_a_single_beat_begins_anew(server: Server) -> None:
    for _ in range(55):
        assert server.look(beats=False) == ""
    server.look()
    server.look()
    assert 15.0 < seconds_until_hung(server, beats=False) <= 16.0
    assert server.look(beats=False) == "engine has given no sign of life for 16 s"


def test_a_process_that_waits_for_a_core_is_not_silent(server: Server) -> None:
    # With a twenty-fifth of a core, silence lasts twenty-five times as long.
    assert seconds_until_hung(server, 300.0, beats=False, waited_s=0.24) == 300.0
    # Several threads of it wait for longer than the clock runs.
    assert seconds_until_hung(server, beats=False, waited_s=2.0) == 600.0


def test_a_look_that_comes_late_counts_for_a_second(server: Server) -> None:
    server.look(beats=False)
    assert server.look(beats=False, passed_s=3600.0) == ""


def test_what_the_process_says_of_itself_is_believed(server: Server) -> None:
    assert server.look(hangs="a step has taken more than 120 s") == "engine hangs: a step has taken more than 120 s"


def test_one_that_does_not_beat_can_be_stopped_but_not_silent() -> None:
    watch = HungWatch(LIMITS, lambda pid: 0.0)
    for now_s in range(100):
        assert watch.look({5: Sign("tritonserver", False)}, float(now_s)) == {}
    assert watch.look({5: Sign("tritonserver", True)}, 100.0) == {}
    assert watch.look({5: Sign("tritonserver", True)}, 103.0) == {5: "tritonserver has been stopped by a signal"}


def test_a_new_process_is_not_judged_by_the_old_ones_record(server: Server) -> None:
    for _ in range(7):
        server.look(stopped=True, beats=False)
    assert server.look(stopped=True, beats=False, pid=6) == ""
