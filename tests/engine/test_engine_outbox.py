"""A sequence keeps nothing of what was handed over but the tokens that a preemption would need."""

from __future__ import annotations

from tests.engine.engine_rig import Rig, make_runner, request


def test_log_probabilities_are_given_back_once_they_were_sent() -> None:
    rig = Rig(make_runner())
    rig.add(request(0, range(9), max_tokens=60, logprobs=20))
    sequence = rig.core.waiting[0]
    steps = 0
    while not rig.core.idle():
        rig.step()  # reads the outbox too
        steps += 1
        assert (len(sequence.logprobs), len(sequence.top)) == (0, 0), f"kept after {steps} steps"
    answer = rig.answers[0]
    assert (len(answer.tokens), len(answer.logprobs), len(answer.top_ids)) == (60, 60, 60)


def test_log_probabilities_wait_for_a_slow_receiver() -> None:
    want = Rig(make_runner()).run([request(0, range(9), max_tokens=30, logprobs=3)])[0]
    rig = Rig(make_runner())
    rig.add(request(0, range(9), max_tokens=30, logprobs=3))
    while not rig.core.idle():
        for _ in range(7):
            rig.core.step()
        rig.read()
    assert rig.answers[0].logprobs == want.logprobs
    assert rig.answers[0].top_ids == want.top_ids
