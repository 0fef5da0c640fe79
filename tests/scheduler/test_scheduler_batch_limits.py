"""Claims about the limits that follow the measured step time."""

from __future__ import annotations

from dataclasses import replace

from tritandem.contracts.stream import LoadSnapshot
from tritandem.scheduler.batch_limits import MIN_SEQUENCES, PIN_STEPS, SETTLE_STEPS, BatchLimits, adjust, initial

TARGET_NS = 50_000_000
LOAD = LoadSnapshot(max_sequences=64, running=64, decode_step_ns=50_000_000, prefill_token_ns=10_000, steps=1000)


def later(load: LoadSnapshot, **fields: int) -> LoadSnapshot:
    return replace(load, steps=load.steps + SETTLE_STEPS, **fields)


def test_the_first_answer_gives_everything_the_engine_offers() -> None:
    assert adjust(BatchLimits(), LOAD, 0, TARGET_NS) == initial(LOAD)
    assert initial(LOAD).sequences == 64


def test_inside_the_band_nothing_changes() -> None:
    limits = initial(LOAD)
    for step_ns in (43_000_000, 50_000_000, 54_000_000):
        assert adjust(limits, later(LOAD, decode_step_ns=step_ns), 64, TARGET_NS) == limits


def test_slow_steps_shrink_prefill_first_then_sequences() -> None:
    limits = initial(LOAD)
    slow = later(LOAD, decode_step_ns=80_000_000, waiting_tokens=500)
    assert adjust(limits, slow, 64, TARGET_NS).prefill_tokens < limits.prefill_tokens
    assert adjust(limits, slow, 64, TARGET_NS).sequences == 64
    slow_without_prefill = later(LOAD, decode_step_ns=80_000_000)
    assert adjust(limits, slow_without_prefill, 64, TARGET_NS).sequences == 54


def test_a_change_needs_steps_to_show_before_the_next() -> None:
    limits = initial(LOAD)
    too_soon = replace(LOAD, steps=LOAD.steps + SETTLE_STEPS - 1, decode_step_ns=80_000_000)
    assert adjust(limits, too_soon, 64, TARGET_NS) == limits


def test_fast_steps_grow_sequences_only_where_they_bind() -> None:
    limits = BatchLimits(32, 10_000, LOAD.steps)
    fast = later(LOAD, decode_step_ns=20_000_000)
    assert adjust(limits, fast, sequences=10, target_step_ns=TARGET_NS).sequences == 32
    assert adjust(limits, fast, sequences=32, target_step_ns=TARGET_NS).sequences == 36


def test_an_engine_that_can_never_meet_the_target_keeps_its_whole_batch_nearly_always() -> None:
    limits, load, seen = initial(LOAD), LOAD, []
    for _ in range(10 * PIN_STEPS // SETTLE_STEPS):
        load = later(load, decode_step_ns=500_000_000, running=limits.sequences)
        limits = adjust(limits, load, limits.sequences, TARGET_NS)
        seen.append(limits.sequences)
    assert min(seen) == MIN_SEQUENCES, "it is tried again now and then"
    assert seen.count(64) > 0.85 * len(seen)


def test_few_running_sequences_are_no_reason_to_go_under_the_floor_or_to_raise_the_limit() -> None:
    limits = initial(LOAD)
    slow = later(LOAD, decode_step_ns=500_000_000, running=2)
    assert adjust(limits, slow, 2, TARGET_NS).sequences == MIN_SEQUENCES
    tiny = later(replace(LOAD, max_sequences=4), decode_step_ns=500_000_000, running=4)
    assert adjust(BatchLimits(4, 100, LOAD.steps), tiny, 4, TARGET_NS).sequences == 4


def test_a_closed_loop_settles_at_the_target_without_swinging() -> None:
    """Step time 10 ms + 1 ms a sequence: 45 sequences meet 55 ms, the upper end of the band."""
    limits, load, seen = initial(LOAD), LOAD, []
    for _ in range(60):
        running = limits.sequences
        load = later(load, decode_step_ns=10_000_000 + running * 1_000_000, running=running)
        limits = adjust(limits, load, running, TARGET_NS)
        seen.append(limits.sequences)
    assert len(set(seen[20:])) == 1
    assert 32 <= seen[-1] <= 45


def test_a_restarted_engine_starts_afresh() -> None:
    old = BatchLimits(9, 300, decided_at_step=5000)
    assert adjust(old, replace(LOAD, steps=3), 0, TARGET_NS) == initial(replace(LOAD, steps=3))


def test_the_prefill_limit_never_exceeds_what_the_measured_pace_allows() -> None:
    generous = BatchLimits(64, 1_000_000, LOAD.steps)
    assert adjust(generous, later(LOAD), 64, TARGET_NS).prefill_tokens == initial(LOAD).prefill_tokens
