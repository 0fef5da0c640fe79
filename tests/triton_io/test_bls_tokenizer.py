"""Texts of direct callers on their way to the tokenizer: short ones pass long ones, and only so many wait."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils
from tritandem.contracts.errors import DeadlineExpired, RequestCancelled, Saturated
from tritandem.contracts.grammars import Grammar, Kind
from tritandem.triton_io.hops import handover
from tritandem.triton_io.hops.bls_tokenizer import LONG_CHARS, MOST_UNTRIED, TRYING_THREADS, BlsTokenizer, _failure
from tritandem.triton_io.hops.handover import Handover
from tritandem.triton_io.hops.text_turns import Turn
from tritandem.triton_io.request.guides import Guide
from tritandem.triton_io.request.prompt_source import PromptSource

from tests.triton_io.handed_over import KEY

SHORT, LONG = PromptSource(text="short"), PromptSource(text="x" * (LONG_CHARS + 1))
LONG_CHAT = PromptSource(chat="x" * (LONG_CHARS + 1))


class Tokenizer:
    """Long texts take until `release`; every answer says how long its text was."""

    def __init__(self) -> None:
        self.release = threading.Event()
        pb_utils.InferenceRequest.models["tokenizer"] = self.encode

    def encode(self, request: Any) -> list[Any]:
        arrays = request.arrays()
        chars = len(arrays["text_input"][0][0]) if "text_input" in arrays else LONG_CHARS + 1
        if chars > LONG_CHARS:
            assert self.release.wait(10)
        handed = handover.pack(Handover(np.array([chars], np.int32), 1, 2), KEY)
        return [pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in handed.items()])]


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    one = Tokenizer()
    yield one
    one.release.set()


def test_a_short_text_waits_for_no_number_of_long_ones(tokenizer: Tokenizer) -> None:
    bls, done = BlsTokenizer(100, threads=2), queue.Queue[int]()
    for prompt in (LONG, LONG_CHAT) * 5:
        bls.submit(prompt, Turn(), lambda ids, at_ns: done.put(int(ids[0])), pytest.fail)
    bls.submit(SHORT, Turn(), lambda ids, at_ns: done.put(int(ids[0])), pytest.fail)
    assert done.get(timeout=5) == len("short")
    tokenizer.release.set()
    bls.close()
    assert done.qsize() == 10


def test_one_text_too_many_is_refused_and_the_next_finds_room_again(tokenizer: Tokenizer) -> None:
    bls, done = BlsTokenizer(3, threads=1), queue.Queue[int]()

    def submit(prompt: PromptSource, tenant: str) -> None:
        bls.submit(prompt, Turn(tenant=tenant), lambda ids, at_ns: done.put(len(ids)), pytest.fail)

    submit(LONG, "greedy")
    submit(LONG, "greedy")
    with pytest.raises(Saturated, match=r"2 texts are waiting for the tokenizer; retry after 1\.0 s"):
        submit(LONG, "greedy")
    submit(LONG, "modest")
    for tenant in ("greedy", "another"):
        with pytest.raises(Saturated, match=r"3 texts are waiting"):
            submit(SHORT, tenant)
    tokenizer.release.set()
    for _ in range(3):
        done.get(timeout=5)
    bls.close()
    assert done.empty()
    assert len(bls._waiting) == 0


def test_a_text_whose_deadline_has_passed_is_not_encoded(tokenizer: Tokenizer) -> None:
    bls, errors = BlsTokenizer(9, threads=1), queue.Queue[Exception]()
    bls.submit(LONG, Turn(deadline_ns=time.monotonic_ns()), lambda ids, at_ns: pytest.fail("encoded"), errors.put)
    assert isinstance(errors.get(timeout=5), DeadlineExpired)
    bls.close()


GUIDE = Guide("guided_regex", Grammar(Kind.REGEX, "a"))


def test_a_text_waits_for_no_number_of_grammars_and_their_number_is_bounded(tokenizer: Tokenizer) -> None:
    bls, done = BlsTokenizer(9, threads=1), queue.Queue[int]()

    def submit(prompt: PromptSource, guide: Guide | None, tenant: str = "") -> None:
        bls.submit(prompt, Turn(tenant=tenant), lambda ids, at_ns: done.put(int(ids[0])), pytest.fail, guide)

    taken = 7 * MOST_UNTRIED // 8
    for _ in range(taken):
        submit(LONG, GUIDE)
    with pytest.raises(Saturated, match=rf"{taken} grammars are waiting for a trial; retry after 1\.0 s"):
        submit(LONG, GUIDE)
    submit(LONG, GUIDE, "another")
    submit(SHORT, None)
    assert done.get(timeout=5) == len("short")
    tokenizer.release.set()
    bls.close()


def test_what_was_cancelled_or_is_too_late_is_not_tried(tokenizer: Tokenizer) -> None:
    bls, errors = BlsTokenizer(99, threads=1), queue.Queue[Exception]()
    gone = threading.Event()
    for _ in range(TRYING_THREADS):
        bls.submit(LONG, Turn(), lambda ids, at_ns: None, errors.put, GUIDE)
    late = Turn(deadline_ns=time.monotonic_ns() + 1)
    for turn in (Turn(), late):
        bls.submit(SHORT, turn, lambda ids, at_ns: pytest.fail("tried"), errors.put, GUIDE, gone.is_set)
    gone.set()
    tokenizer.release.set()
    assert {type(errors.get(timeout=5)) for _ in range(2)} == {RequestCancelled}
    bls.submit(SHORT, late, lambda ids, at_ns: pytest.fail("tried"), errors.put, GUIDE)
    assert isinstance(errors.get(timeout=5), DeadlineExpired)
    bls.close()


def test_a_full_queue_of_tritons_is_no_failure() -> None:
    error = _failure("in ensemble 'ensemble', [request id: a] Exceeds maximum queue size")
    assert isinstance(error, Saturated)
