"""Claims about timing steps and about how far ahead they are launched."""

from __future__ import annotations

import numpy as np
import pytest
from tritandem.engine.host.pace import SLACK_NS, Pace
from tritandem.engine.step import StepResult

MS = 1_000_000


def timed(pace: Pace, steps: list[tuple[float, int]]) -> Pace:
    """Back-to-back steps of (ms, prefill tokens), launched ahead of their predecessor's end."""
    none, end_ns = np.zeros(0, np.int32), 10**9
    for taken_ms, prefill_tokens in steps:
        end_ns += int(taken_ms * MS)
        pace.note(StepResult(1, none, none, none.astype(np.uint8), 10**9, end_ns), prefill_tokens)
    return pace


def test_a_prefill_is_timed_by_what_it_adds_to_a_decode_step() -> None:
    pace = timed(Pace(), [(5, 0)] * 50 + [(15, 1000)])
    assert pace.decode_step_ns == pytest.approx(5 * MS)
    assert pace.prefill_token_ns == pytest.approx(10_000)


def test_the_tail_of_a_cached_prompt_hardly_changes_the_price_of_a_token() -> None:
    alternating = [(5, 0), (15, 1000), (5, 0), (6, 6)] * 40
    assert timed(Pace(), alternating).prefill_token_ns == pytest.approx(11_000, rel=0.1)


def test_a_launch_is_due_so_early_that_it_is_done_before_the_shortest_recent_step_would_end() -> None:
    pace = timed(Pace(), [(9, 0)] * 20 + [(6, 0)] + [(9, 0)] * 3)
    ended_ns = 10**9 + (20 * 9 + 6 + 27) * MS
    pace.note_launch(MS // 2, with_prefill=False)
    pace.note_launch(2 * MS, with_prefill=True)
    assert pace.launch_due_ns(ended_ns - MS, 0, with_prefill=False) == ended_ns + 6 * MS - SLACK_NS - MS // 2
    assert pace.launch_due_ns(ended_ns - MS, 0, with_prefill=True) == ended_ns + 6 * MS - SLACK_NS - 2 * MS
    late_ns = ended_ns + 3 * MS  # the device had nothing to do when it was launched
    assert pace.launch_due_ns(late_ns, 0, with_prefill=False) == late_ns + 6 * MS - SLACK_NS - MS // 2
    assert Pace().launch_due_ns(late_ns, 0, with_prefill=False) == 0, "nothing was timed yet"


def test_a_running_prefill_is_expected_to_take_no_longer_than_those_of_its_size() -> None:
    pace = timed(Pace(), [(5, 0)] * 20 + [(6, 33), (15, 1000), (14, 900), (5, 0)])

    def takes_ns(tokens: int) -> int:
        due_ns = pace.launch_due_ns(10**12, tokens, with_prefill=False)
        return due_ns - 10**12 + SLACK_NS if due_ns else 0

    assert takes_ns(0) == 5 * MS
    assert takes_ns(63) == 6 * MS, "as long as the smaller one at least"
    assert takes_ns(1000) == 14 * MS
    assert takes_ns(600) == pytest.approx(9 * MS, rel=1e-6), "its share of the 1,000"
    assert takes_ns(300) == takes_ns(2177) == 0, "nothing of their size was timed"


def test_a_costly_launch_is_remembered_for_a_while() -> None:
    pace = timed(Pace(), [(5, 0)] * 9)

    def margin_ns() -> int:
        return 10**12 + 5 * MS - SLACK_NS - pace.launch_due_ns(10**12, 0, with_prefill=False)

    pace.note_launch(3 * MS, with_prefill=False)
    pace.note_launch(MS, with_prefill=False)
    assert 2 * MS < margin_ns() < 3 * MS
    for _ in range(200):
        pace.note_launch(MS, with_prefill=False)
    assert margin_ns() == MS


def test_the_share_of_prompts_is_that_of_the_sequences_that_ended() -> None:
    pace = Pace()
    assert pace.prompt_share == 0
    pace.note_end(1000, 500)
    assert pace.prompt_share == pytest.approx(2)
    for _ in range(1000):
        pace.note_end(100, 50)
        pace.note_end(50, 150)
    assert pace.prompt_share == pytest.approx(150 / 200, rel=0.05)
    for _ in range(300):
        pace.note_end(0, 0)  # cancelled before they began
    assert pace.prompt_share == pytest.approx(150 / 200, rel=0.05)


def test_time_behind_adds_up_while_prompts_wait_and_runs_off_afterwards() -> None:
    pace = Pace()
    launches_ms = [(1000, False), (1020, True), (1045, True), (1065, False), (2065, False)]
    seconds = []
    for at_ms, behind in launches_ms:
        pace.note_backlog(at_ms * MS, behind)
        seconds.append(pace.behind_s)
    assert seconds == pytest.approx([0, 0.02, 0.045, 0.025, 0])
    for step in range(1000):
        pace.note_backlog((3000 + 20 * step) * MS, True)
    assert pace.behind_s == 2


def test_the_tokens_of_a_pause_follow_the_price_of_a_token() -> None:
    assert Pace().pause_tokens == 0
    assert timed(Pace(), [(20, 0)] * 50 + [(30, 1000)]).pause_tokens == pytest.approx(10_000, rel=1e-3)
    assert timed(Pace(), [(20, 0)] * 50 + [(220, 1000)]).pause_tokens == pytest.approx(500, rel=1e-2)
    tails = [(5, 0), (7, 6)] * 50
    assert timed(Pace(), tails).pause_tokens == 0, "the last tokens of cached prompts do not tell"
    assert timed(Pace(), [*tails, (5, 0), (25, 1000), *tails]).pause_tokens > 5000
    assert timed(Pace(), [(184, 0)] * 50 + [(300, 100)]).pause_tokens == 1, "a decode step alone takes longer"


def test_long_steps_are_launched_one_ahead_and_short_ones_as_far_as_allowed() -> None:
    assert timed(Pace(), [(5, 0)] * 9).steps_ahead(3) == 1
    assert timed(Pace(), [(1.4, 0)] * 9).steps_ahead(3) == 3
    assert timed(Pace(), [(0.4, 0)] * 9).steps_ahead(3) == 3
    assert Pace().steps_ahead(3) == 3, "nothing was timed yet"
    assert timed(Pace(), [(150, 0)] * 9).steps_ahead(0) == 0, "a runner that finishes at launch"
