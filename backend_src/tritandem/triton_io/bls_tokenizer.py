"""Ids for requests that reach the scheduler with text: asks the model `tokenizer` over BLS.

Owns two small pools of threads, each thread blocked in one call: concurrent calls meet in the tokenizer's dynamic
batcher, so that batching and its CPU pool are shared with the ensemble. Long texts have a pool of their own, because
they may take a hundred times as long: short ones never wait for them. `execute` never waits here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ..contracts import EngineFailed, Int32Array, InvalidRequest, Saturated, TritandemError
from .prompt_source import PromptSource
from .waiting_texts import WaitingTexts

THREADS = 8  # of each pool
LONG_CHARS = 16384
_OUTPUTS = ["input_ids", "tokenized_ns"]
_INVALID = re.compile(rf"{InvalidRequest.outcome.value}: (.*?): given (.*), allowed: (.*)", re.DOTALL)
_SATURATED = re.compile(rf"{Saturated.outcome.value}: (.*); retry after ([0-9.]+) s", re.DOTALL)


class RemoteInvalid(InvalidRequest):
    """An InvalidRequest that another process has already put into words."""

    def __init__(self, field_name: str, given: str, allowed: str) -> None:
        super().__init__(field_name, given, allowed)
        self.args = (f"{field_name}: given {given}, allowed: {allowed}",)


class BlsTokenizer:
    """Calls come from Triton's thread; `then` and `failed` run on a thread of a pool. `max_waiting` texts at most wait
    here for their ids."""

    def __init__(self, max_waiting: int, model_name: str = "tokenizer", threads: int = THREADS) -> None:
        self._waiting, self._model_name = WaitingTexts(max_waiting), model_name
        self._short = ThreadPoolExecutor(threads, thread_name_prefix="bls-tokenize")
        self._long = ThreadPoolExecutor(threads, thread_name_prefix="bls-tokenize-long")

    def submit(
        self,
        prompt: PromptSource,
        request_id: str,
        then: Callable[[Int32Array, int], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Exactly one of `then(ids, tokenized_ns)` and `failed(error)` is called, later. Raises Saturated."""

        def run() -> None:
            try:
                ids, tokenized_ns = self._encode(prompt, request_id)
            except Exception as error:
                failed(error)
            else:
                then(ids, tokenized_ns)
            finally:
                self._waiting.leave()

        self._waiting.enter()
        (self._long if prompt.chars > LONG_CHARS else self._short).submit(run)

    def close(self) -> None:
        """Wait for the calls that are under way."""
        self._short.shutdown(wait=True)
        self._long.shutdown(wait=True)

    def _encode(self, prompt: PromptSource, request_id: str) -> tuple[Int32Array, int]:
        inputs, parameters = [], {}
        if prompt.text is not None:
            inputs.append(pb_utils.Tensor("text_input", np.array([[prompt.text.encode()]], dtype=np.object_)))
        else:
            # A request without any tensor cannot be made; `stop` false says nothing.
            inputs.append(pb_utils.Tensor("stop", np.zeros((1, 1), np.bool_)))
            parameters["messages"] = json.dumps(prompt.messages)
        request = pb_utils.InferenceRequest(
            model_name=self._model_name,
            requested_output_names=_OUTPUTS,
            inputs=inputs,
            request_id=request_id,
            parameters=parameters,
        )
        response = request.exec()
        if response.has_error():
            raise error_of(response.error().message())
        arrays: dict[str, Any] = {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
        return np.array(arrays["input_ids"].reshape(-1), np.int32), int(arrays["tokenized_ns"].reshape(-1)[1])


def error_of(message: str) -> TritandemError:
    """What the tokenizer said, as the error it was."""
    if found := _INVALID.search(message):
        return RemoteInvalid(*found.groups())
    if found := _SATURATED.search(message):
        return Saturated(found[1], float(found[2]))
    return EngineFailed(f"tokenizer: {message}")
