"""Claims about timing steps and about how far ahead they are launched."""

from __future__ import annotations

import numpy as np
import pytest
from tritandem.engine.pace import Pace
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


def test_long_steps_are_launched_one_ahead_and_short_ones_as_far_as_allowed() -> None:
    assert timed(Pace(), [(5, 0)] * 9).steps_ahead(3) == 1
    assert timed(Pace(), [(1.4, 0)] * 9).steps_ahead(3) == 3
    assert timed(Pace(), [(0.4, 0)] * 9).steps_ahead(3) == 3
    assert Pace().steps_ahead(3) == 3, "nothing was timed yet"
    assert timed(Pace(), [(150, 0)] * 9).steps_ahead(0) == 0, "a runner that finishes at launch"
