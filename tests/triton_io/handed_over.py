"""Requests and tensors as Triton hands them to a plug."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from tritandem.triton_io.hops.inner_key import InnerKey
from tritandem.triton_io.request import schema

KEY = InnerKey(b"of this server")


def text(*words: str | bytes) -> Any:
    return np.array([[w.encode() if isinstance(w, str) else w for w in words]], dtype=np.object_)


def one(value: Any, dtype: Any) -> Any:
    return np.array([[value]], dtype=dtype)


def received(
    arrays: dict[str, Any],
    parameters: dict[str, Any] | bytes | None = None,
    request_id: str | bytes = "r1",
    outputs: list[str] | None = None,
    sender: pb_utils.ResponseSender | None = None,
) -> tuple[pb_utils.InferenceRequest, pb_utils.ResponseSender]:
    """A request as a plug gets it, and where its responses go."""
    sender = sender or pb_utils.ResponseSender()
    request = pb_utils.InferenceRequest(
        inputs=[pb_utils.Tensor(name, array) for name, array in arrays.items()],
        parameters=parameters,
        request_id=request_id,
        requested_output_names=[t.name for t in schema.OUTPUTS] if outputs is None else outputs,
        sender=sender,
    )
    return request, sender


def answered_by(plug: Any) -> Callable[[pb_utils.InferenceRequest], list[Any]]:
    """A call of another model, answered by its plug."""

    def call(request: pb_utils.InferenceRequest) -> list[Any]:
        parameters = json.loads(request.parameters())
        forwarded, sender = received(
            request.arrays(), parameters, request.request_id(), request.requested_output_names()
        )
        plug.execute([forwarded])
        responses: list[Any] = sender.wait_end()
        return responses

    return call
