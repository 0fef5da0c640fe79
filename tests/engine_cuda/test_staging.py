"""A staging slot is never rewritten while a copy may read it, and every transfer is counted."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from tritandem.engine.runners.staging import SIZE_CLASSES, SLOT_ALIGNMENT, Packed, Route, StagingPool, choose_route

CPU = torch.device("cpu")


class ManualEvent:
    """Passes when the test says so; waiting for it lets it pass, as a device would in time."""

    def __init__(self) -> None:
        self.recorded = self.passed = False
        self.waits = 0

    def record(self) -> None:
        self.recorded, self.passed = True, False

    def query(self) -> bool:
        assert self.recorded, "an event is asked before it was recorded"
        return self.passed

    def synchronize(self) -> None:
        assert self.recorded
        self.waits += 1
        self.passed = True


def pool(**options: int) -> StagingPool:
    return StagingPool(CPU, ManualEvent, pin=False, **options)


def test_arrays_arrive_one_behind_the_other_in_one_copy() -> None:
    staging = pool()
    arrays = [np.arange(5, dtype=np.int32), np.array([], np.int32), np.arange(40, 60, 3, dtype=np.int32)]
    packed = staging.pack(arrays)
    staging.copy(packed)
    assert packed.num_words == 12
    assert packed.words[:12].tolist() == [0, 1, 2, 3, 4, 40, 43, 46, 49, 52, 55, 58]
    assert staging.counters.transfers[Route.PINNED] == 1
    assert staging.counters.num_bytes[Route.PINNED] == 48


def test_only_words_are_packed() -> None:
    with pytest.raises(TypeError, match="int64"):
        pool().pack([np.zeros(2, np.int64)])


def test_slots_are_aligned() -> None:
    packed = pool().pack([np.zeros(1, np.int32)])
    assert packed.slot.host.data_ptr() % SLOT_ALIGNMENT == 0


def test_a_slot_is_not_rewritten_before_its_last_reader_has_run() -> None:
    staging = pool(slots_per_class=1, max_slots_per_class=1)
    first = staging.pack([np.array([1], np.int32)])
    staging.copy(first)
    staging.release(first)
    second = staging.pack([np.array([2], np.int32)])
    assert second.slot is first.slot
    event = first.slot.read
    assert isinstance(event, ManualEvent)
    assert event.waits == 1


def test_the_pool_grows_to_its_limit_before_anyone_waits() -> None:
    staging = pool(slots_per_class=1, max_slots_per_class=3)
    used: dict[int, ManualEvent] = {}
    for slots, waits in ((1, 0), (2, 0), (3, 0), (3, 1)):
        packed = staging.pack([np.zeros(8, np.int32)])
        assert isinstance(packed.slot.read, ManualEvent)
        used[id(packed.slot)] = packed.slot.read
        staging.copy(packed)
        staging.release(packed)
        assert (len(used), sum(event.waits for event in used.values())) == (slots, waits)


def test_random_use_never_hands_out_a_slot_twice() -> None:
    rng = random.Random(7)
    staging = pool(slots_per_class=2, max_slots_per_class=8)
    held: list[tuple[Packed, int]] = []
    flying: list[tuple[Packed, int]] = []
    for value in range(600):
        action = rng.random()
        if action < 0.5 and len(held) < 6:
            packed = staging.pack([np.full(rng.choice((3, 2000, 20000)), value, np.int32)])
            staging.copy(packed)
            busy = {id(p.slot) for p, _ in held}
            busy |= {id(p.slot) for p, _ in flying if not p.slot.read.query() and p.slot is not packed.slot}
            assert id(packed.slot) not in busy
            flying = [(p, v) for p, v in flying if p.slot is not packed.slot]
            held.append((packed, value))
        elif held and action < 0.8:
            packed, expected = held.pop(rng.randrange(len(held)))
            assert bool((packed.words[: packed.num_words] == expected).all())
            staging.release(packed)
            flying.append((packed, expected))
        elif flying:
            packed, _ = flying.pop(0)
            packed.slot.read.synchronize()


def test_what_fits_no_slot_is_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        pool().pack([np.zeros(SIZE_CLASSES[-1] // 4 + 1, np.int32)])


def test_routes_follow_size_and_frequency() -> None:
    assert choose_route(2048, per_step=True, from_device=True) is Route.ZERO_COPY
    assert choose_route(2048, per_step=True, from_device=False) is Route.PINNED
    assert choose_route(1 << 20, per_step=True, from_device=True) is Route.PINNED
    assert choose_route(1 << 30, per_step=True, from_device=False) is Route.PAGEABLE
    assert choose_route(2048, per_step=False, from_device=False) is Route.PAGEABLE


def test_what_is_rare_goes_either_way_in_memory_of_its_own() -> None:
    staging = pool()
    pairs = np.array([(3, 4), (5, 6)], np.int64)
    brought = staging.bring(pairs)
    assert (brought.dtype, brought.tolist()) == (torch.int64, [[3, 4], [5, 6]])
    landed = staging.land(brought[:, 1].float())
    brought.zero_()
    assert landed.tolist() == [4.0, 6.0]
    assert staging.counters.num_bytes[Route.PINNED] == 32 + 8
