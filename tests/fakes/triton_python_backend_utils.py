"""A strict stand-in for the module that Triton's stub provides: what it does not know, it refuses.

Response senders record what they are given and object to a response after FINAL, as the real backend does.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_MEMORY_CPU = 1


class TritonModelException(Exception):
    pass


class TritonError:
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "INTERNAL", "INVALID_ARG", "UNAVAILABLE", "CANCELLED"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> str:
        return self._code


class Logger:
    """Lines by level, for tests to read."""

    lines: list[tuple[str, str]] = []  # noqa: RUF012

    @classmethod
    def log_info(cls, text: str) -> None:
        cls.lines.append(("info", text))

    @classmethod
    def log_warn(cls, text: str) -> None:
        cls.lines.append(("warn", text))

    @classmethod
    def log_error(cls, text: str) -> None:
        cls.lines.append(("error", text))


class Tensor:
    def __init__(self, name: str, array: Any) -> None:
        if not isinstance(array, np.ndarray):
            raise TypeError(f"{name}: a Tensor wants a numpy array, not {type(array).__name__}")
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        if error is not None and output_tensors:
            raise ValueError("a response has tensors or an error")
        self._tensors, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def arrays(self) -> dict[str, Any]:
        """For tests."""
        return {tensor.name(): tensor.as_numpy() for tensor in self._tensors}


class MetricFamily:
    """Values of all series by family name, for tests to read. Triton shares them between processes, as this does."""

    COUNTER, GAUGE = "counter", "gauge"
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}  # noqa: RUF012

    def __init__(self, name: str, description: str, kind: str) -> None:
        if kind not in (self.COUNTER, self.GAUGE):
            raise ValueError(f"unknown kind {kind}")
        self._series = self.values.setdefault(name, {})
        self._kind = kind

    def Metric(self, labels: dict[str, str]) -> Metric:  # noqa: N802
        return Metric(self._series, tuple(sorted(labels.items())), self._kind)


class Metric:
    def __init__(self, series: dict[tuple[tuple[str, str], ...], float], key: Any, kind: str) -> None:
        self._series, self._key, self._kind = series, key, kind
        series.setdefault(key, 0.0)

    def increment(self, value: float) -> None:
        if self._kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException("a counter cannot be decremented")
        self._series[self._key] += value

    def set(self, value: float) -> None:
        if self._kind == MetricFamily.COUNTER:
            raise TritonModelException("a counter cannot be set")
        self._series[self._key] = value


class ResponseSender:
    """`before_send` may block in the place of a process round trip."""

    def __init__(self, before_send: Callable[[], None] = lambda: None) -> None:
        self.responses: list[InferenceResponse] = []
        self.ended = threading.Event()
        self.gone = False
        self._before_send = before_send
        self._changed = threading.Condition()

    def send(self, response: InferenceResponse, flags: int = 0) -> None:
        if self.ended.is_set():
            raise TritonModelException("response sender has been closed")
        self._before_send()
        with self._changed:
            self.responses.append(response)
            self._changed.notify_all()
        if flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.ended.set()
        elif flags:
            raise ValueError(f"unknown flags {flags}")

    def is_cancelled(self) -> bool:
        return self.gone

    def wait(self, count: int, timeout_s: float = 5.0) -> list[InferenceResponse]:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.responses) >= count, timeout_s):
                raise AssertionError(f"{len(self.responses)} responses after {timeout_s} s, expected {count}")
            return list(self.responses)

    def wait_end(self, timeout_s: float = 5.0) -> list[InferenceResponse]:
        if not self.ended.wait(timeout_s):
            raise AssertionError(f"no FINAL after {timeout_s} s")
        return self.responses


class PreferredMemory:
    def __init__(self, kind: int, device_id: int = 0) -> None:
        if kind != TRITONSERVER_MEMORY_CPU:
            raise ValueError(f"unexpected memory {kind}")


class InferenceTrace:
    """What Triton says about tracing a request: a JSON object as text, None when it does not trace it."""

    def __init__(self, context: str | None) -> None:
        self._context = context

    def get_context(self) -> str | None:
        return self._context


class InferenceRequest:
    """Both kinds: one that a plug receives, and one that it makes to call another model.

    `models` maps a model's name to what answers a call: arrays and parameters in, responses out. An id or parameters
    given as bytes are what a client sent: like the real one, this makes texts of them only when it is asked.
    """

    models: dict[str, Callable[[InferenceRequest], Iterable[InferenceResponse]]] = {}  # noqa: RUF012
    decoupled: set[str] = set()  # noqa: RUF012

    def __init__(
        self,
        model_name: str = "",
        requested_output_names: Sequence[str] = (),
        inputs: Sequence[Tensor] = (),
        request_id: str | bytes = "",
        parameters: dict[str, Any] | bytes | None = None,
        preferred_memory: PreferredMemory | None = None,
        sender: ResponseSender | None = None,
        trace: InferenceTrace | None = None,
    ) -> None:
        self._trace = trace or InferenceTrace(None)
        self._model_name, self._inputs, self._request_id = model_name, list(inputs), request_id
        self._requested, self._parameters, self._sender = list(requested_output_names), parameters or {}, sender
        self._memory = preferred_memory

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._request_id if isinstance(self._request_id, str) else self._request_id.decode()

    def parameters(self) -> str:
        given = self._parameters
        return given.decode() if isinstance(given, bytes) else json.dumps(given)

    def trace(self) -> InferenceTrace:
        return self._trace

    def requested_output_names(self) -> list[str]:
        return self._requested

    def get_response_sender(self) -> ResponseSender:
        if self._sender is None:
            raise AssertionError("this request was made to be sent, not to be answered")
        return self._sender

    def arrays(self) -> dict[str, Any]:
        """For tests."""
        return {tensor.name(): tensor.as_numpy() for tensor in self._inputs}

    def exec(self, decoupled: bool = False) -> Any:
        if not self._inputs:
            raise TritonModelException("a request needs an input")
        if decoupled != (self._model_name in self.decoupled):
            raise TritonModelException(f"{self._model_name}: wrong value of `decoupled`")
        responses = self.models[self._model_name](self)
        if decoupled:
            return ResponseIterator(responses)
        [response] = responses
        return response


class ResponseIterator:
    """Two traits of the real one: it frees a response's memory when it moves on (here by overwriting it), and a
    `for` over one that has ended begins anew."""

    def __init__(self, responses: Iterable[InferenceResponse]) -> None:
        self._coming = iter(responses)
        self._seen: list[InferenceResponse] = []
        self._again: Iterator[InferenceResponse] = iter(())
        self.ended = False

    def __iter__(self) -> ResponseIterator:
        if self.ended:
            self._again = iter(self._seen)
        return self

    def __next__(self) -> InferenceResponse:
        if self.ended:
            return next(self._again)
        for tensor in self._seen[-1].output_tensors() if self._seen else ():
            array = tensor.as_numpy()
            if array.flags.writeable and array.dtype.kind in "if":
                array.fill(-1)
        try:
            self._seen.append(next(self._coming))
        except StopIteration:
            self.ended = True
            raise
        return self._seen[-1]
