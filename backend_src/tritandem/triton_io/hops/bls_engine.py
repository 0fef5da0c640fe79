"""The scheduler's EnginePort over Triton: one decoupled call to the engine for tokens, plain calls for the rest.

`stream` is iterated by one thread at a time; streams of several engines share a gate (see stream_gate). `submit`,
`cancel` and `load` are one round trip each, from any thread, through the engine's own relay (see call_relay): one that
hangs with its engine holds up no other. Every way in which the engine cannot be reached is EngineFailed. Knows
nothing about scheduling.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ...config import RELAY_SUFFIX
from ...contracts.arrays import Int32Array, Int64Array
from ...contracts.errors import Draining, EngineFailed, TritandemError
from ...contracts.requests import EngineRequest
from ...contracts.stream import LoadSnapshot, TokenBatch
from ..stub_2_51.finished_calls import FinishedCalls
from ..stub_2_51.stream_gate import StreamGate
from . import engine_wire
from .engine_wire import Op, WireBatch
from .inner_key import InnerKey

# The stub keeps every response of a call until the call has ended (a step of 256 sequences: 17 KB of shared memory
# and 19 KB of its own): after so many responses or bytes of arrays the next call takes over.
ROTATE_AFTER_RESPONSES = 1024
ROTATE_AFTER_BYTES = 8 << 20
END_STREAM_S = 5.0  # for another thread to leave the stream
# Triton's words for new calls after SIGTERM; calls that were open before go on to their end.
_SHUTTING_DOWN = ("Server not ready", "stopped accepting")


class _ShuttingDown(EngineFailed):
    """Triton takes no new calls, but the open stream still delivers."""


class BlsEngine:
    """One engine model by its name in the model repository, and the key that it and its relay want to see."""

    def __init__(self, name: str, key: InnerKey, finished_calls: FinishedCalls, gate: StreamGate) -> None:
        self.name, self._key = name, key
        self._latest_load = LoadSnapshot()
        self._finished_calls, self._gate = finished_calls, gate
        self._reading = threading.Lock()  # held by who iterates the stream

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
        """One stream for the caller, several calls to Triton. A reader that has been given up is made to leave."""
        if not self._reading.acquire(blocking=False):
            self._call(engine_wire.pack_call(Op.END_STREAM))
            if not self._reading.acquire(timeout=END_STREAM_S):
                raise EngineFailed(f"{self.name}: the previous token stream does not end")
        try:
            call = self._open_stream()
            while call is not None:
                call = yield from self._read(call)
        except pb_utils.TritonModelException as error:
            raise EngineFailed(f"{self.name} cannot be reached: {error}") from error
        finally:
            self._reading.release()

    def _read(self, call: Any) -> Generator[TokenBatch, None, Any]:
        """Yields the batches of one call to its end. Returns the call that has taken over, None without one.

        The next call is opened while this one is open: at shutdown Triton refuses new calls and lets open ones
        go on, so that this one is all there is, for as long as it takes.
        """
        successor, ended = None, False
        responses = size = 0
        try:
            while (response := self._next(call)) is not None:
                ended = response.has_error()  # always the last one
                outputs = self._outputs(response)
                responses += 1
                if not outputs:
                    continue  # the greeting, a sign of life, or the end
                errors = _bytes(outputs.get("errors")) or None
                wire = WireBatch(outputs["header"], outputs["tokens"], outputs.get("floats"), errors)
                batch = engine_wire.unpack_batch(wire)
                self._latest_load = batch.load
                yield batch
                size += sum(array.nbytes for array in outputs.values())
                if successor is None and (responses >= ROTATE_AFTER_RESPONSES or size >= ROTATE_AFTER_BYTES):
                    successor = self._open_successor()
                    responses = size = 0
            ended = True
        finally:
            if ended:
                self._finished_calls.keep(call)
                # Also because a clean-up under way while a thread waits in the next call can deadlock the stub.
                self._finished_calls.settle()
            else:
                self._abandon(call, successor)
        return successor

    def _abandon(self, *calls: Any) -> None:
        """The reader stops in mid-stream: the engine ends the open call, and it is read to that end.

        When the engine cannot be reached, its calls stay open; the stub then keeps its own references.
        """
        with contextlib.suppress(EngineFailed):
            self._call(engine_wire.pack_call(Op.END_STREAM))
            for call in calls:
                if call is not None:
                    with self._gate.reading():
                        self._finished_calls.keep(call)

    def _open_stream(self) -> Any:
        self._finished_calls.settle()
        request = pb_utils.InferenceRequest(
            model_name=self.name,
            requested_output_names=engine_wire.STREAM_OUTPUTS,
            inputs=[pb_utils.Tensor("header", self._key.lock(engine_wire.pack_call(Op.STREAM)))],
            preferred_memory=_host_memory(),
        )
        with self._gate.opening():
            return request.exec(decoupled=True)

    def _next(self, call: Any) -> Any:
        """The next response, None at the end."""
        with self._gate.reading():
            return next(call, None)

    def _open_successor(self) -> Any:
        """The next call, and with it the end of this one; None when Triton takes no new calls."""
        successor = self._open_stream()
        if not self._next(successor).has_error():  # the greeting
            return successor
        self._finished_calls.keep(successor)
        return None

    def _call(self, header: Int64Array, tokens: Int32Array | None = None) -> dict[str, Any]:
        inputs = [pb_utils.Tensor("header", self._key.lock(header))]
        if tokens is not None:
            inputs.append(pb_utils.Tensor("tokens", tokens))
        request = pb_utils.InferenceRequest(
            model_name=self.name + RELAY_SUFFIX,
            requested_output_names=engine_wire.CALL_OUTPUTS,
            inputs=inputs,
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
