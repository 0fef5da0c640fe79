"""The model `engine`: submit, cancel, stream and load calls in front of an EngineService.

Owns the one open stream and the thread that feeds it. Calls arrive on Triton's thread and answer at once;
batches go out on the sender thread, where `send` blocks for a process round trip: meanwhile the service
coalesces, so that a slow receiver costs message size, never steps.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ...contracts.stream import TokenBatch
from ...engine.service import EngineService
from ...telemetry.publisher import Publisher
from ..answer.replies import FINAL, answer_each, error_response, send_last
from ..hops import engine_wire
from ..hops.engine_wire import Op
from ..hops.inner_key import InnerKey
from ..request.incoming import read_arrays

WAIT_S = 0.1  # how often an idle sender looks whether it shall end, and gives a sign of life


class EnginePlug:
    """`execute` and `close` are called from Triton's thread. A call without `key` is refused and does nothing.
    `publisher`, if any, was started and is closed here."""

    def __init__(
        self, service: EngineService, stream_idle_s: float, key: InnerKey, publisher: Publisher | None = None
    ) -> None:
        self._service, self._key = service, key
        self._publisher = publisher
        self._stream_idle_s = stream_idle_s
        self._sender: _StreamSender | None = None
        self._handlers: dict[int, Callable[[Any, Any], Any]] = {
            Op.SUBMIT: self._submit,
            Op.CANCEL: self._cancel,
            Op.LOAD: self._load,
            Op.END_STREAM: self._end_stream,
        }

    def execute(self, requests: Sequence[Any]) -> None:
        answer_each(requests, self._answer)

    def close(self) -> None:
        """End the stream, then the engine, then the metrics; nothing is sent afterwards."""
        if self._sender is not None:
            self._sender.end()
        self._service.close()
        if self._publisher is not None:
            self._publisher.close()

    def _answer(self, request: Any, sender: Any) -> None:
        inputs = read_arrays(request)
        header = self._key.unlock(inputs["header"])
        if header[0] == Op.STREAM:
            self._open_stream(sender)
            return
        sender.send(self._handlers[int(header[0])](header, inputs.get("tokens")), flags=FINAL)

    def _submit(self, header: Any, tokens: Any) -> Any:
        errors = engine_wire.pack_errors(self._service.submit(engine_wire.unpack_submit(header, tokens)))
        return _reply(errors=np.frombuffer(errors, np.uint8)) if errors else _reply(header=_DONE)

    def _cancel(self, header: Any, _tokens: Any) -> Any:
        self._service.cancel(engine_wire.unpack_cancel(header))
        return _reply(header=_DONE)

    def _load(self, _header: Any, _tokens: Any) -> Any:
        return _reply(header=engine_wire.pack_load(self._service.load()))

    def _end_stream(self, _header: Any, _tokens: Any) -> Any:
        if self._sender is not None:
            self._sender.end()
        return _reply(header=_DONE)

    def _open_stream(self, sender: Any) -> None:
        """A second stream takes over from the first, which ends when it has sent what it had taken."""
        if self._sender is not None:
            self._sender.end()
        self._sender = _StreamSender(self._service, sender, self._stream_idle_s)


_DONE = np.zeros(1, np.int64)


def _reply(**arrays: Any) -> Any:
    return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in arrays.items()])


class _StreamSender:
    """One stream call: an empty greeting, so that opening it never waits for tokens, then batches until the engine
    has been idle for a while or another call takes over, then FINAL, exactly once. While there is no batch, empty
    responses take the reader out of its wait: others can open their calls only then (see stream_gate)."""

    def __init__(self, service: EngineService, sender: Any, idle_s: float) -> None:
        self._service = service
        self._sender = sender
        self._idle_s = idle_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-stream", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Returns when FINAL has been sent."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        last: Any = pb_utils.InferenceResponse(output_tensors=[])
        try:
            self._forward()
        except Exception as error:
            last = error_response(error)
        send_last(self._sender, last)

    def _forward(self) -> None:
        self._sender.send(pb_utils.InferenceResponse(output_tensors=[]))
        busy_s = time.monotonic()
        while not self._stop.is_set():
            batch = self._service.next_batch(WAIT_S)
            if batch is not None:
                self._sender.send(_batch_response(batch))
                busy_s = time.monotonic()
                continue
            if self._service.live():
                busy_s = time.monotonic()
            elif time.monotonic() - busy_s >= self._idle_s:
                return
            self._sender.send(pb_utils.InferenceResponse(output_tensors=[]))


def _batch_response(batch: TokenBatch) -> Any:
    wire = engine_wire.pack_batch(batch)
    arrays: dict[str, Any] = {"header": wire.header, "tokens": wire.tokens}
    if wire.floats is not None:
        arrays["floats"] = wire.floats
    if wire.errors is not None:
        arrays["errors"] = np.frombuffer(wire.errors, np.uint8)
    return _reply(**arrays)
