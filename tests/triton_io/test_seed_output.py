"""What goes back at the end of an answer to who asked for it: its seed, and what stopped it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils
from tritandem.contracts.answers import Chunk
from tritandem.contracts.errors import Outcome
from tritandem.contracts.requests import OutputOptions
from tritandem.contracts.stream import FinishReason
from tritandem.triton_io.answer.sinks import TritonSink
from tritandem.triton_io.request.decoder import ReturnOptions
from tritandem.triton_io.stub_2_51.finished_calls import FinishedCalls

SEED = 2**63 - 1


def test_the_seed_comes_last_and_only_when_asked_for() -> None:
    for names in ({"used_seed"}, set()):
        sender = pb_utils.ResponseSender()
        returns = ReturnOptions(OutputOptions(stream=True), frozenset(names))
        sink = TritonSink(sender, returns, ["text_output", "used_seed"], str, FinishedCalls())
        sink.send(Chunk("a", 1, seed=SEED))
        sink.finish(Chunk("!", 1, FinishReason.LENGTH, Outcome.COMPLETED, seed=SEED))
        first, last = (response.arrays() for response in sender.wait_end())
        assert "used_seed" not in first
        assert ("used_seed" in last) == bool(names)
        if names:
            assert (last["used_seed"].dtype, last["used_seed"].tolist()) == (np.uint64, [SEED])


@pytest.mark.parametrize("reason", ["END\n", 42, None])
def test_what_stopped_it_comes_last_as_json_and_only_when_asked_for(reason: str | int | None) -> None:
    for names in ({"stop_reason"}, set()):
        sender = pb_utils.ResponseSender()
        returns = ReturnOptions(OutputOptions(stream=True), frozenset(names))
        sink = TritonSink(sender, returns, ["text_output", "stop_reason"], str, FinishedCalls())
        sink.send(Chunk("a", 1))
        sink.finish(Chunk("!", 1, FinishReason.STOP, Outcome.COMPLETED, stop_reason=reason))
        first, last = (response.arrays() for response in sender.wait_end())
        assert "stop_reason" not in first
        assert ("stop_reason" in last) == bool(names)
        if names:
            assert json.loads(last["stop_reason"].item()) == reason


def test_each_of_several_answers_has_its_own_reason() -> None:
    sender = pb_utils.ResponseSender()
    returns = ReturnOptions(OutputOptions(), frozenset({"stop_reason"}))
    sink = TritonSink(sender, returns, ["text_output", "stop_reason"], str, FinishedCalls())
    each = [Chunk("a", 1, FinishReason.STOP, Outcome.COMPLETED, stop_reason=reason) for reason in ("END", None, 42)]
    sink.finish(replace(each[0], choices=tuple(each)))
    [response] = sender.wait_end()
    assert [json.loads(one) for one in response.arrays()["stop_reason"].flatten()] == ["END", None, 42]
