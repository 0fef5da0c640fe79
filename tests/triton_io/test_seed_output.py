"""The seed of an answer goes back to who asked for it."""

from __future__ import annotations

import numpy as np
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
