"""Requests that no client should send, as Triton hands them to any plug, and the words that each is refused with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tests.triton_io.handed_over import received, text

HI = {"text_input": text("hi")}
MEGABYTES = 10_000_000


class Torn(pb_utils.Tensor):
    """Bytes that Triton's own reader gives up on."""

    def as_numpy(self) -> Any:
        raise RuntimeError("/opt/tritonserver/backends: unexpected end of buffer")


def torn() -> tuple[Any, Any]:
    sender = pb_utils.ResponseSender()
    return pb_utils.InferenceRequest(inputs=[Torn("text_input", text("a"))], sender=sender), sender


BAD: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "a bad byte in a value": (
        lambda: received(HI, b'{"tenant": "\xff"}'),
        "parameters: given 'invalid UTF-8 at",
    ),
    "a Latin-1 name": (lambda: received(HI, b'{"ten\xe4nt": "a"}'), "parameters: given 'invalid UTF-8 at byte 5'"),
    "parameters that are no JSON": (lambda: received(HI, b'{"a": inf}'), "parameters: given 'not JSON"),
    "a bad byte in the id": (lambda: received(HI, request_id=b"\xff"), "request_id: given 'invalid UTF-8 at byte 0'"),
    "a long id": (lambda: received(HI, request_id="i" * MEGABYTES), "allowed: a text of at most 256 characters"),
    "a bad byte in the text": (
        lambda: received({"text_input": text(b"\xff")}),
        "text_input: given 'invalid UTF-8",
    ),
    "an empty tensor": (
        lambda: received({"text_input": np.empty((1, 0), np.object_)}),
        r"input: given 'shape \[1, 0\]'",
    ),
    "no shape": (lambda: received({"text_input": np.array(b"a", np.object_)}), r"text_input: given 'shape \[\]'"),
    "another type": (lambda: received({"text_input": np.zeros((1, 1))}), "text_input: given 'dtype float64'"),
    "a torn tensor": (torn, r"text_input: given 'bytes that are no valid tensor \(RuntimeError\)'"),
    "an unknown tensor": (lambda: received(HI | {"x\x1b": np.zeros(1)}), r"x\\u001b: given 'an unknown input'"),
    "a long name": (lambda: received(HI, {"x" * MEGABYTES: 1}), "given 'an unknown parameter'"),
    "long messages": (lambda: received({"text_input": text("")}, {"messages": "[" * MEGABYTES}), "messages: given"),
    "no messages": (lambda: received({"text_input": text("")}, {"messages": "[1]"}), "messages: given"),
}
