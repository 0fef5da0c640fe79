"""What the fake Triton servers share: the inputs they accept, a request as a model sees it, who came when."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tritandem.triton_io.request.schema import INPUTS
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

ONE_VALUE = {tensor.name: tensor.dtype for tensor in INPUTS if tensor.dims == (1,)}
MANY_VALUES = {tensor.name: tensor.dtype for tensor in INPUTS if tensor.dims == (-1,)}
PARAMETERS = {
    "messages": str,
    "tools": str,
    "priority_class": str,
    "deadline_ms": int,
    "tenant": str,
    "traceparent": str,
}


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


class FakeTriton:
    """What a fake server is asked for and told, whatever it speaks; a fault of the client fails the test at the end."""

    def __init__(self, model: Model) -> None:
        self.visitors = Visitors(model)
        self.ready = True
        self.index_closed = False
        self.models = {"scheduler": ("READY", ""), "ensemble": ("READY", "")}

    def die(self) -> None:
        """Cut every connection now, as a killed process would."""
        raise NotImplementedError

    def __exit__(self, *exc: object) -> None:
        self.die()
        self.visitors.raise_faults()


# The layout of raw tensors by NVIDIA's own library: the client's code must not be its own judge.


def elements(datatype: str, raw: bytes) -> list[Any]:
    if datatype == "BYTES":
        return [text.decode() for text in deserialize_bytes_tensor(raw)]
    values: list[Any] = np.frombuffer(raw, triton_to_np_dtype(datatype)).tolist()
    return values


def raw_tensor(datatype: str, values: list[Any]) -> bytes:
    if datatype == "BYTES":
        texts = np.array([value.encode() for value in values], dtype=np.object_)
        return bytes(serialize_byte_tensor(texts).item()) if values else b""
    return bytes(np.array(values, triton_to_np_dtype(datatype)).tobytes())
