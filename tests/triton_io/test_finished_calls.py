"""When the references to finished calls may go."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest
import triton_python_backend_utils as pb_utils
from tritandem.triton_io.stub_2_51.finished_calls import FinishedCalls


class Witness:
    def __init__(self, answer: bool, while_asked: Callable[[], None] = lambda: None) -> None:
        self.answer, self.while_asked, self.questions = answer, while_asked, 0

    def asked(self) -> bool:
        self.questions += 1
        self.while_asked()
        return self.answer


def call(responses: int = 3) -> pb_utils.ResponseIterator:
    return pb_utils.ResponseIterator(pb_utils.InferenceResponse() for _ in range(responses))


def test_a_call_is_read_to_its_end_and_not_beyond() -> None:
    calls = FinishedCalls()
    begun, over = call(), call()
    next(begun)
    assert len(list(over)) == 3
    for one in (begun, over):
        calls.keep(one)
        assert one.ended
    assert len(calls) == 2


def test_nothing_is_freed_before_an_open_request_has_answered() -> None:
    calls = FinishedCalls()
    kept = call()
    alive = weakref.ref(kept)
    calls.keep(kept)
    del kept
    assert not calls.settle()
    silent, speaking = Witness(False), Witness(True)
    calls.opened(silent)
    assert not calls.settle()
    assert alive() is not None
    calls.opened(speaking)
    assert calls.settle()
    assert alive() is None
    assert speaking.questions == 1


def test_a_call_that_ends_during_the_question_waits_for_the_next_one() -> None:
    calls = FinishedCalls()
    calls.keep(call())
    late = call()
    witness = Witness(True, lambda: calls.keep(late) if len(calls) == 1 else None)
    calls.opened(witness)
    assert calls.settle()
    assert len(calls) == 1
    witness.while_asked = lambda: None
    assert calls.settle()
    assert len(calls) == 0


def test_nobody_is_asked_when_nothing_is_kept_or_after_it_has_closed() -> None:
    calls = FinishedCalls()
    witness = Witness(True)
    calls.opened(witness)
    assert calls.settle()
    calls.keep(call())
    calls.closed(witness)
    assert not calls.settle()
    assert witness.questions == 0


def test_settling_from_several_threads_frees_each_call_once() -> None:
    calls = FinishedCalls()
    both = threading.Barrier(2, timeout=5.0)
    for _ in range(2):
        calls.opened(Witness(True, both.wait))
    calls.keep(call())
    threads = [threading.Thread(target=calls.settle) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5.0)
    assert len(calls) == 0


@pytest.mark.parametrize("count", [0, 1])
def test_an_empty_call_is_kept_too(count: int) -> None:
    calls = FinishedCalls()
    calls.keep(call(count))
    assert len(calls) == 1
