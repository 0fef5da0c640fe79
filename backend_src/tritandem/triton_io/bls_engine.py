"""The scheduler's EnginePort over Triton: one decoupled call to the engine for tokens, plain calls for the rest.

`stream` is iterated by one reader thread and must stay this process's only decoupled call (see call_relay);
`submit`, `cancel` and `load` are one round trip each, from any thread. Every way in which the engine cannot be
reached is EngineFailed. Knows nothing about scheduling.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ..contracts import (
    Draining,
    EngineFailed,
    EngineRequest,
    Int32Array,
    Int64Array,
    LoadSnapshot,
    TokenBatch,
    TritandemError,
)
from . import call_relay, engine_wire
from .engine_wire import Op, WireBatch

CALLS_MODEL = "engine_calls"
_STREAM_OUTPUTS = ["header", "tokens", "floats", "errors"]
# Triton's words for new calls after SIGTERM; calls that were open before go on to their end.
_SHUTTING_DOWN = ("Server not ready", "stopped accepting")


class _ShuttingDown(EngineFailed):
    """Triton takes no new calls, but the open stream still delivers."""


class BlsEngine:
    """One engine model by its name in the model repository."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._latest_load = LoadSnapshot()
        self._last_stream: Any = None  # see call_relay: kept until the next one, to be freed under the GIL

    def submit(self, requests: Sequence[EngineRequest]) -> list[TritandemError | None]:
        header, tokens = engine_wire.pack_submit(requests)
        try:
            outputs = self._call(header, tokens)
        except _ShuttingDown:
            return [Draining() for _ in requests]
        return engine_wire.unpack_errors(_bytes(outputs.get("errors")), len(requests))

    def cancel(self, seq_ids: Sequence[int]) -> None:
        try:
            self._call(engine_wire.pack_call(Op.CANCEL, seq_ids))
        except _ShuttingDown:
            return  # the sequences run to their end; failing here would take the other streams down

    def load(self) -> LoadSnapshot:
        with contextlib.suppress(_ShuttingDown):  # then: what the stream said last
            self._latest_load = engine_wire.unpack_load(self._call(engine_wire.pack_call(Op.LOAD))["header"])
        return self._latest_load

    def stream(self) -> Iterator[TokenBatch]:
        request = pb_utils.InferenceRequest(
            model_name=self.name,
            requested_output_names=_STREAM_OUTPUTS,
            inputs=[pb_utils.Tensor("header", engine_wire.pack_call(Op.STREAM))],
            preferred_memory=_host_memory(),
        )
        try:
            self._last_stream = request.exec(decoupled=True)
            for response in self._last_stream:
                outputs = self._outputs(response)
                if outputs:  # the closing response is empty
                    errors = _bytes(outputs.get("errors")) or None
                    wire = WireBatch(outputs["header"], outputs["tokens"], outputs.get("floats"), errors)
                    batch = engine_wire.unpack_batch(wire)
                    self._latest_load = batch.load
                    yield batch
        except pb_utils.TritonModelException as error:
            raise EngineFailed(f"{self.name} cannot be reached: {error}") from error

    def _call(self, header: Int64Array, tokens: Int32Array | None = None) -> dict[str, Any]:
        inputs = [pb_utils.Tensor("header", header)]
        if tokens is not None:
            inputs.append(pb_utils.Tensor("tokens", tokens))
        request = pb_utils.InferenceRequest(
            model_name=CALLS_MODEL,
            requested_output_names=call_relay.OUTPUTS,
            inputs=inputs,
            parameters={"engine": self.name},
            preferred_memory=_host_memory(),
        )
        try:
            response = request.exec()
            return {name: np.array(array) for name, array in self._outputs(response).items()}
        except pb_utils.TritonModelException as error:
            raise self._failure(str(error)) from error

    def _outputs(self, response: Any) -> dict[str, Any]:
        """Arrays that belong to Triton: valid as long as `response` lives. Raises EngineFailed."""
        if response.has_error():
            raise self._failure(response.error().message())
        return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}

    def _failure(self, message: str) -> EngineFailed:
        kind = _ShuttingDown if any(words in message for words in _SHUTTING_DOWN) else EngineFailed
        return kind(f"{self.name}: {message}")


def _host_memory() -> Any:
    return pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU)


def _bytes(array: Any) -> bytes:
    return b"" if array is None else bytes(np.asarray(array, dtype=np.uint8))
