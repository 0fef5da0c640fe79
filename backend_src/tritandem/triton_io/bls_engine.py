"""The scheduler's EnginePort over Triton: calls the model `engine` from this process (BLS).

`submit`, `cancel` and `load` are one round trip each, from any thread; `stream` is iterated by one reader
thread. Every way in which the engine cannot be reached is EngineFailed. Knows nothing about scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ..contracts import EngineFailed, EngineRequest, Int32Array, Int64Array, LoadSnapshot, TokenBatch, TritandemError
from . import engine_wire
from .engine_wire import Op, WireBatch

_OUTPUTS = ["header", "tokens", "floats", "errors"]


class BlsEngine:
    """One engine model by its name in the model repository."""

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, requests: Sequence[EngineRequest]) -> list[TritandemError | None]:
        header, tokens = engine_wire.pack_submit(requests)
        outputs = self._call(header, tokens)
        return engine_wire.unpack_errors(_bytes(outputs.get("errors")), len(requests))

    def cancel(self, seq_ids: Sequence[int]) -> None:
        self._call(engine_wire.pack_call(Op.CANCEL, seq_ids))

    def load(self) -> LoadSnapshot:
        return engine_wire.unpack_load(self._call(engine_wire.pack_call(Op.LOAD))["header"])

    def stream(self) -> Iterator[TokenBatch]:
        for outputs in self._responses(engine_wire.pack_call(Op.STREAM)):
            if outputs:  # the closing response is empty
                errors = _bytes(outputs.get("errors")) or None
                wire = WireBatch(outputs["header"], outputs["tokens"], outputs.get("floats"), errors)
                yield engine_wire.unpack_batch(wire)

    def _call(self, header: Int64Array, tokens: Int32Array | None = None) -> dict[str, Any]:
        """The one response of a call, copied: its arrays belong to Triton as soon as the iterator goes on."""
        first: dict[str, Any] | None = None
        for outputs in self._responses(header, tokens):
            first = {name: np.array(array) for name, array in outputs.items()} if first is None else first
        if first is None:
            raise EngineFailed(f"{self.name} gave no answer")
        return first

    def _responses(self, header: Int64Array, tokens: Int32Array | None = None) -> Iterator[dict[str, Any]]:
        inputs = [pb_utils.Tensor("header", header)]
        if tokens is not None:
            inputs.append(pb_utils.Tensor("tokens", tokens))
        request = pb_utils.InferenceRequest(
            model_name=self.name, requested_output_names=_OUTPUTS, inputs=inputs, preferred_memory=_host_memory()
        )
        try:
            for response in request.exec(decoupled=True):
                if response.has_error():
                    raise EngineFailed(f"{self.name}: {response.error().message()}")
                yield {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        except pb_utils.TritonModelException as error:
            raise EngineFailed(f"{self.name} cannot be reached: {error}") from error


def _host_memory() -> Any:
    return pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU)


def _bytes(array: Any) -> bytes:
    return b"" if array is None else bytes(np.asarray(array, dtype=np.uint8))
