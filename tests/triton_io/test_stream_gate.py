"""No thread reads while another opens."""

from __future__ import annotations

import threading
import time

import pytest
from tritandem.triton_io.stub_2_51.stream_gate import StreamGate

WAIT_S = 5.0


def test_readers_read_side_by_side() -> None:
    gate, met = StreamGate(), threading.Barrier(2)

    def read() -> None:
        with gate.reading():
            met.wait(WAIT_S)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert not met.broken


def test_nobody_reads_or_opens_while_one_opens() -> None:
    gate, inside, seen = StreamGate(), [0, 0], []

    def read() -> None:
        for _ in range(200):
            with gate.reading():
                inside[0] += 1
                seen.append(inside[1])
                inside[0] -= 1

    def open_calls() -> None:
        for _ in range(100):
            with gate.opening():
                inside[1] += 1
                time.sleep(0.0001)
                seen.append(inside[0])
                seen.append(inside[1] - 1)
                inside[1] -= 1

    threads = [threading.Thread(target=target) for target in (read, read, open_calls, open_calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert set(seen) == {0}
    assert len(seen) == 2 * 200 + 2 * 100 * 2


def test_an_opener_waits_for_the_reader_to_come_out_and_new_readers_wait_for_the_opener() -> None:
    gate, entered, leave = StreamGate(patience_s=60.0), threading.Event(), threading.Event()
    order: list[str] = []

    def first() -> None:
        with gate.reading():
            entered.set()
            leave.wait(WAIT_S)
            order.append("read")

    def opener() -> None:
        with gate.opening():
            order.append("opened")

    def second() -> None:
        with gate.reading():
            order.append("read again")

    threads = [threading.Thread(target=target) for target in (first, opener, second)]
    threads[0].start()
    assert entered.wait(WAIT_S)
    threads[1].start()
    while not gate._openers:  # only then is the second reader behind it
        time.sleep(0.001)
    threads[2].start()
    time.sleep(0.05)
    leave.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert order == ["read", "opened", "read again"]


def test_a_reader_that_never_comes_out_does_not_hold_up_the_others_for_ever() -> None:
    patience_s = 0.3
    gate, entered, leave = StreamGate(patience_s), threading.Event(), threading.Event()

    def read() -> None:
        with gate.reading():
            entered.set()
            leave.wait(WAIT_S)

    stuck = threading.Thread(target=read)
    stuck.start()
    assert entered.wait(WAIT_S)
    begun_s = time.monotonic()
    with gate.opening():
        assert time.monotonic() - begun_s >= patience_s
    begun_s = time.monotonic()
    for _ in range(10):
        with gate.opening():
            assert stuck.is_alive()
        with gate.reading():
            pass
    assert time.monotonic() - begun_s < 5 * patience_s  # it was waited for once, not ten times more
    leave.set()
    stuck.join()


def test_a_failed_opening_leaves_the_gate_open() -> None:
    gate, entered = StreamGate(), threading.Event()

    def read() -> None:
        with gate.reading():
            entered.set()

    with pytest.raises(RuntimeError), gate.opening():
        raise RuntimeError
    threading.Thread(target=read, daemon=True).start()
    assert entered.wait(WAIT_S)
