"""Whose text is next: nobody waits behind all the texts of one tenant."""

from __future__ import annotations

import random
import threading

from tritandem.contracts.requests import PriorityClass
from tritandem.triton_io.hops.text_turns import MIN_DEADLINES, TextTurns, Turn

from tests.fakes.clock import FakeClock


class Texts:
    """Puts named texts and takes them by name, on one thread."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.turns = TextTurns(self.clock)
        self._taken: list[str] = []

    def put(self, name: str, **turn: object) -> None:
        self.turns.put(Turn(**turn), lambda: self._taken.append(name))  # type: ignore[arg-type]

    def take(self, count: int) -> list[str]:
        before = len(self._taken)
        for _ in range(count):
            run = self.turns.take()
            assert run is not None
            run()
            self.turns.done()
        return self._taken[before:]


def test_tenants_take_turns_and_a_higher_class_of_one_goes_before_its_lower() -> None:
    texts = Texts()
    for i in range(1000):
        texts.put(f"flood {i}", tenant="flood")
    texts.put("modest", tenant="modest")
    texts.put("interactive", tenant="flood", priority=PriorityClass.INTERACTIVE)
    texts.put("batch", tenant="modest", priority=PriorityClass.BATCH)
    assert texts.take(6) == ["interactive", "modest", "flood 0", "batch", "flood 1", "flood 2"]


def test_a_text_whose_deadline_has_passed_goes_before_all_that_came_earlier() -> None:
    texts = Texts()
    for i in range(3):
        texts.put(f"early {i}", deadline_ns=texts.clock() + 10**12)
    texts.put("late", deadline_ns=texts.clock() + 10**9)
    assert texts.take(1) == ["early 0"]
    texts.clock.advance(1.0)
    assert texts.take(3) == ["late", "early 1", "early 2"]


def test_a_text_of_a_request_that_is_to_stop_goes_next_and_once() -> None:
    texts = Texts()
    for i in range(5):
        texts.put(f"{i}", request_id=f"r{i % 4}")
    for _ in range(3):
        texts.turns.hurry("r0")
        texts.turns.hurry("nobody")
    assert texts.take(5) == ["0", "4", "1", "2", "3"]


def test_texts_that_were_taken_leave_nothing_behind() -> None:
    texts, rng = Texts(), random.Random(4)
    for i in range(5000):
        its = {"tenant": str(rng.randrange(50)), "request_id": str(rng.randrange(20))}
        texts.put(str(i), deadline_ns=texts.clock() + 10**15 if i % 2 else None, **its)
        if rng.random() < 0.1:
            texts.turns.hurry(its["request_id"])
        while len(texts.turns) > rng.randrange(1, 100):
            texts.take(1)
    texts.take(len(texts.turns))
    texts.turns.close()
    assert texts.turns.take() is None
    turns = texts.turns
    assert (len(turns), turns._of_id, len(turns._of_tenant), len(turns._urgent)) == (0, {}, 0, 0)
    assert len(turns._deadlines) <= MIN_DEADLINES


def test_every_text_is_handed_out_once_to_threads_that_wait_and_what_is_left_after_close() -> None:
    turns, done, lock = TextTurns(), list[int](), threading.Lock()

    def work() -> None:
        while (run := turns.take()) is not None:
            with lock:
                run()
            turns.done()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for i in range(500):
        turns.put(Turn(tenant=str(i % 7)), lambda i=i: done.append(i))  # type: ignore[misc]
    turns.close()
    for thread in threads:
        thread.join(10)
    assert sorted(done) == list(range(500))


def test_one_text_at_a_time_while_that_is_asked_for_and_side_by_side_afterwards() -> None:
    texts, out, most, go = Texts(), 0, 0, threading.Event()
    counting, all_out = threading.Lock(), threading.Semaphore(0)
    texts.turns.one_at_a_time(None)

    def run() -> None:
        nonlocal out, most
        with counting:
            out += 1
            most = max(most, out)
        all_out.release()
        go.wait(10)
        with counting:
            out -= 1

    def work() -> None:
        while (taken := texts.turns.take()) is not None:
            taken()
            texts.turns.done()

    for _ in range(9):
        texts.turns.put(Turn(), run)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert all_out.acquire(timeout=10)
    assert not all_out.acquire(timeout=0.05)  # the three others wait
    texts.turns.one_at_a_time(texts.clock() + 10**9)
    go.set()
    for _ in range(8):
        assert all_out.acquire(timeout=10)
    assert most == 1

    go.clear()
    texts.clock.advance(1.0)
    for _ in range(4):
        texts.turns.put(Turn(), run)
    for _ in range(4):
        assert all_out.acquire(timeout=10)
    go.set()
    texts.turns.close()
    for thread in threads:
        thread.join(10)
    assert most == 4


def test_who_waits_for_the_one_text_goes_on_when_the_time_is_over() -> None:
    texts, taken = Texts(), threading.Semaphore(0)
    texts.turns.one_at_a_time(texts.clock() + 10**9)
    for name in "abc":
        texts.put(name)
    first = texts.turns.take()
    assert first is not None

    def take() -> None:
        texts.turns.take()
        taken.release()

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert not taken.acquire(timeout=0.05)
    texts.clock.advance(1.0)
    texts.turns.done()
    for _ in threads:
        assert taken.acquire(timeout=10)
    for thread in threads:
        thread.join(10)
