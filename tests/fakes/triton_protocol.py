"""What the fake Triton servers share: the inputs they accept, a request as a model sees it, who came when."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

ONE_VALUE = {
    "text_input": "BYTES",
    "max_tokens": "INT32",
    "min_tokens": "INT32",
    "temperature": "FP32",
    "top_k": "INT32",
    "top_p": "FP32",
    "min_p": "FP32",
    "repetition_penalty": "FP32",
    "presence_penalty": "FP32",
    "frequency_penalty": "FP32",
    "seed": "UINT64",
    "end_id": "INT32",
    "sampling_parameters": "BYTES",
    "stream": "BOOL",
    "stop": "BOOL",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
    "return_cumulative_logprob": "BOOL",
    "return_logprobs": "BOOL",
    "return_seed": "BOOL",
}
MANY_VALUES = {"input_ids": "INT32", "stop_words": "BYTES", "bad_words": "BYTES"}
PARAMETERS = {"messages": str, "priority_class": str, "deadline_ms": int, "tenant": str, "traceparent": str}


@dataclass
class Received:
    """One request; `gone` is set when its client has cancelled or vanished."""

    model: str
    request_id: str
    inputs: dict[str, list[Any]]
    parameters: dict[str, Any]
    headers: dict[str, str]
    gone: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        for name, value in self.parameters.items():
            assert isinstance(value, PARAMETERS.get(name, ())), f"unexpected parameter {name}={value!r}"
        if "messages" in self.parameters:
            assert isinstance(json.loads(self.parameters["messages"]), list), "messages is a JSON list"

    @property
    def is_stop(self) -> bool:
        return "stop" in self.inputs

    @property
    def prompt(self) -> str:
        return str(self.inputs.get("text_input", [""])[0])


Outputs = dict[str, tuple[str, list[Any]]]  # name -> (datatype, elements)
Model = Callable[[Received], Iterator["Outputs | Exception | None"]]
"""Yields output tensors; an Exception is answered as an error response with its text, None as an empty final one."""


class Visitors:
    """Every request that reached a fake server, and every fault that a client committed."""

    def __init__(self, model: Model) -> None:
        self.requests: list[Received] = []
        self.faults: list[BaseException] = []
        self._model = model
        self._arrived = threading.Condition()

    def admit(self, request: Received) -> Iterator[Outputs | Exception | None]:
        with self._arrived:
            self.requests.append(request)
            self._arrived.notify_all()
        return self._model(request)

    def wait_for(self, wanted: Callable[[Received], bool], timeout_s: float = 10.0) -> Received:
        """The first request that fits, waiting for it to arrive."""
        with self._arrived:
            assert self._arrived.wait_for(lambda: any(map(wanted, self.requests)), timeout_s), "no such request came"
            return next(filter(wanted, self.requests))

    def raise_faults(self) -> None:
        if self.faults:
            raise AssertionError("the client sent something wrong") from self.faults[0]
