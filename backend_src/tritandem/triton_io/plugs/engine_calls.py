"""The model `engine_calls`: hands a call that has one answer to the decoupled `engine` and gives the answer back.

Runs in a process of its own. In Triton's stub three locks are taken in a circle when one thread opens a
decoupled call (GIL, then the table of iterators), one waits in another call's iterator (its lock, then the
GIL) and a response arrives (the table, then that lock). Here one thread does one call at a time: no circle.

Finished calls are freed by the batch, see finished_calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ...config import RELAY_SUFFIX
from ...contracts.errors import ConfigError, EngineFailed
from ..answer.replies import FINAL, answer_each
from ..hops.engine_wire import CALL_OUTPUTS
from ..hops.inner_key import InnerKey, load_inner_key
from ..request.incoming import read_arrays
from ..stub_2_51.finished_calls import FinishedCalls
from .process import Process, WatchedPlug

KEPT_CALLS = 32


def start(process: Process) -> WatchedPlug:
    """Raises ConfigError."""
    return process.watched(CallRelay(process.args["model_name"], load_inner_key()))


class CallRelay:
    """Called from Triton's thread only. `model_name`: its own; raises ConfigError for one that names no engine. A call
    without `key` goes nowhere."""

    def __init__(self, model_name: str, key: InnerKey) -> None:
        self._engine = model_name.removesuffix(RELAY_SUFFIX)
        if self._engine in ("", model_name):
            raise ConfigError(f"{model_name}: a relay is named after its engine, NAME{RELAY_SUFFIX}")
        self._key = key
        self._finished = FinishedCalls()

    def execute(self, requests: Sequence[Any]) -> None:
        answer_each(requests, self._answer)

    def _answer(self, request: Any, sender: Any) -> None:
        inputs = read_arrays(request)
        self._key.unlock(inputs["header"])
        try:
            response = self._forward(inputs)
        finally:
            if len(self._finished) >= KEPT_CALLS:
                self._settle(sender)
        sender.send(response, flags=FINAL)

    def close(self) -> None:
        """Nothing is under way between two calls."""

    def _settle(self, sender: Any) -> None:
        witness = _OpenRequest(sender)
        self._finished.opened(witness)
        self._finished.settle()
        self._finished.closed(witness)

    def _forward(self, inputs: dict[str, Any]) -> Any:
        """Raises EngineFailed when the engine answers with an error or not at all."""
        call = pb_utils.InferenceRequest(
            model_name=self._engine,
            requested_output_names=CALL_OUTPUTS,
            inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
        )
        try:
            responses = call.exec(decoupled=True)
            try:
                answer = _first_answer(responses)
            finally:
                self._finished.keep(responses)
        except pb_utils.TritonModelException as error:
            raise EngineFailed(str(error)) from error
        if answer is None:
            raise EngineFailed(f"{self._engine} gave no answer")
        return pb_utils.InferenceResponse(answer)


def _first_answer(responses: Any) -> list[Any] | None:
    """Raises EngineFailed for an error response."""
    for response in responses:
        if response.has_error():
            raise EngineFailed(response.error().message())
        if response.output_tensors():
            # Copied: the arrays belong to Triton as soon as the iterator goes on.
            return [pb_utils.Tensor(t.name(), np.array(t.as_numpy())) for t in response.output_tensors()]
    return None


class _OpenRequest:
    """A Witness: the call that is being answered."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def asked(self) -> bool:
        return not self._sender.is_cancelled()  # a yes may be remembered, a no never is
