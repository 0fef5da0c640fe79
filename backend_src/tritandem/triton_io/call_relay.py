"""The model `engine_calls`: hands a call that has one answer to a decoupled engine and gives the answer back.

Runs in a process of its own. In Triton's stub three locks are taken in a circle when one thread opens a
decoupled call (GIL, then the table of iterators), one waits in another call's iterator (its lock, then the
GIL) and a response arrives (the table, then that lock). Here one thread does one call at a time: no circle.

A finished call is kept for a while: the stub drops its own reference on a thread that does not hold the GIL,
and if that reference is the last one it frees Python objects there, which crashes Python 3.12.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ..contracts import EngineFailed
from .replies import error_response

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
OUTPUTS = ["header", "errors"]
KEPT_CALLS = 64


class CallRelay:
    """Called from Triton's thread only."""

    def __init__(self) -> None:
        self._finished: deque[Any] = deque(maxlen=KEPT_CALLS)

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                response = self._forward(request)
            except Exception as error:  # answered, not raised: the other calls of the batch go on
                response = error_response(error)
            sender.send(response, flags=FINAL)

    def _forward(self, request: Any) -> Any:
        """Raises EngineFailed when the engine answers with an error or not at all."""
        engine = json.loads(request.parameters())["engine"]
        call = pb_utils.InferenceRequest(
            model_name=engine,
            requested_output_names=OUTPUTS,
            inputs=[pb_utils.Tensor(tensor.name(), tensor.as_numpy()) for tensor in request.inputs()],
        )
        answer = None
        try:
            responses = call.exec(decoupled=True)
            self._finished.append(responses)
            for response in responses:  # read to the end, so that nothing stays open
                if response.has_error():
                    raise EngineFailed(response.error().message())
                if response.output_tensors() and answer is None:
                    # Copied: the arrays belong to Triton as soon as the iterator goes on.
                    answer = [pb_utils.Tensor(t.name(), np.array(t.as_numpy())) for t in response.output_tensors()]
        except pb_utils.TritonModelException as error:
            raise EngineFailed(str(error)) from error
        if answer is None:
            raise EngineFailed(f"{engine} gave no answer")
        return pb_utils.InferenceResponse(answer)
