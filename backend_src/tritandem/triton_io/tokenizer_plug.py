"""The model `tokenizer`: text, chat or ids in, ids and stamps out; one `execute` serves many requests.

`execute` returns before long texts are done: each request has its own response sender, so that a short text
never waits for a long one in its batch, and the dynamic batcher goes on. Responses are sent from Triton's
thread for short texts and from the tokenizer's pool for long ones.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import numpy as np
import triton_python_backend_utils as pb_utils

from ..contracts import Int32Array, InvalidRequest
from .prompt_source import PromptSource, read_parameters, read_prompt
from .replies import error_response
from .tensor_values import Inputs

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL

# Ids of a request that has no prompt because it stops another one; the scheduler does not read them.
_STOP_IDS: Int32Array = np.zeros(1, np.int32)


class Encoded(Protocol):
    @property
    def ids(self) -> Int32Array: ...


class Tokenizer(Protocol):
    """What is used of `tokenizer.TextTokenizer`."""

    def submit(self, text: str) -> Future[Any]: ...

    def submit_chat(self, messages: Sequence[dict[str, Any]]) -> Future[Any]: ...

    def close(self) -> None: ...


class TokenizerPlug:
    """Answers every request exactly once, with ids or with the error of that request alone."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def execute(self, requests: Sequence[Any]) -> None:
        """Short texts are answered when this returns, long ones later."""
        received_ns = time.monotonic_ns()
        prompts: list[tuple[int, PromptSource, Any]] = []
        for request in requests:
            sender = request.get_response_sender()
            try:
                arrays = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
                prompt = read_prompt(Inputs(arrays), read_parameters(request.parameters()))
            except InvalidRequest as error:
                sender.send(error_response(error), flags=FINAL)
                continue
            prompts.append((_cost(prompt), prompt, sender))
        for _, prompt, sender in sorted(prompts, key=lambda entry: entry[0]):
            self._encode(prompt, sender, received_ns)

    def close(self) -> None:
        """Wait for the texts that are still being encoded; nothing is sent afterwards."""
        self._tokenizer.close()

    def _encode(self, prompt: PromptSource, sender: Any, received_ns: int) -> None:
        if prompt.text is not None:
            future = self._tokenizer.submit(prompt.text)
        elif prompt.messages is not None:
            future = self._tokenizer.submit_chat(prompt.messages)
        else:
            ids = _STOP_IDS if prompt.input_ids is None else prompt.input_ids
            _answer(sender, ids, received_ns)
            return
        future.add_done_callback(lambda done: _answer_future(sender, done, received_ns))


def _cost(prompt: PromptSource) -> int:
    """Characters to encode: the order in which a batch is worked on."""
    if prompt.text is not None:
        return len(prompt.text)
    return sum(len(str(message)) for message in prompt.messages or ())


def _answer_future(sender: Any, done: Future[Any], received_ns: int) -> None:
    error = done.exception()
    if error is None:
        _answer(sender, done.result().ids, received_ns)
    else:
        sender.send(error_response(error), flags=FINAL)


def _answer(sender: Any, ids: Int32Array, received_ns: int) -> None:
    stamps = np.array([[received_ns, time.monotonic_ns()]], np.int64)
    tensors = [pb_utils.Tensor("input_ids", ids.reshape(1, -1)), pb_utils.Tensor("tokenized_ns", stamps)]
    sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=FINAL)
