"""Ids for requests that reach the scheduler with text: asks the model `tokenizer` over BLS.

Owns small pools of threads, each thread blocked in one call: concurrent calls meet in the tokenizer's dynamic batcher,
so that batching and its CPU pool are shared with the ensemble. Long texts, and grammars to be tried, have pools of
their own, because they may take a hundred times as long: short texts never wait for them. `execute` never waits here.
Who goes next is `text_turns`' to say.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
import triton_python_backend_utils as pb_utils

from ...contracts.arrays import Int32Array
from ...contracts.errors import DeadlineExpired, EngineFailed, RequestCancelled, Saturated, TritandemError
from ..answer.replies import log_failure
from ..request.guides import Guide, pack_guide
from ..request.prompt_source import PromptSource
from ..request.schema import GRAMMAR
from . import handover
from .handover import Handover
from .text_turns import TextTurns, Turn
from .waiting_texts import RETRY_AFTER_S, WaitingTexts

THREADS = 8  # of each pool
TRYING_THREADS = 16  # more than may wait for long trials
MOST_UNTRIED = 256  # grammars
LONG_CHARS = 16384
QUEUE_FULL = "Exceeds maximum queue size"  # Triton's own words


class BlsTokenizer:
    """Calls come from Triton's thread; `then` and `failed` run on a thread of a pool. `max_waiting` texts at most wait
    here for their ids."""

    def __init__(self, max_waiting: int, model_name: str = "tokenizer", threads: int = THREADS) -> None:
        self._waiting, self._model_name = WaitingTexts(max_waiting), model_name
        self._untried = WaitingTexts(MOST_UNTRIED, "grammars are waiting for a trial")
        self._short, self._long, self._trying = self._pools = TextTurns(), TextTurns(), TextTurns()
        kinds = ("", threads), ("long-", threads), ("trying-", TRYING_THREADS)
        self._threads = [
            threading.Thread(target=_work, args=(turns,), name=f"bls-tokenize-{kind}{i}", daemon=True)
            for turns, (kind, count) in zip(self._pools, kinds, strict=True)
            for i in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        prompt: PromptSource,
        turn: Turn,
        then: Callable[[Int32Array, int], None],
        failed: Callable[[Exception], None],
        guide: Guide | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> None:
        """Exactly one of `then(ids, tokenized_ns)` and `failed(error)` is called, later. Raises Saturated.

        `guide`: is tried there too. A prompt of ids is not sent, and its ids come back without meaning. `cancelled` is
        asked before a trial.
        """
        pool, waiting = self._long if prompt.chars > LONG_CHARS else self._short, self._waiting
        if guide is not None:
            pool, waiting = self._trying, self._untried

        def run() -> None:
            try:
                if guide is not None and cancelled is not None and cancelled():
                    raise RequestCancelled("the client closed the stream before its grammar was tried")
                if turn.deadline_ns is not None and time.monotonic_ns() >= turn.deadline_ns:
                    raise DeadlineExpired("the deadline passed before the text was tokenized")
                handed = self._encode(prompt, turn, guide)
                if handed.refusal is not None:
                    raise handed.refusal
            except Exception as error:
                failed(error)
            else:
                then(handed.ids, handed.tokenized_ns)
            finally:
                waiting.leave(turn.tenant, turn.priority)

        waiting.enter(turn.tenant, turn.priority)
        pool.put(turn, run)

    def begin_yielding(self) -> None:
        """Until `end_yielding` one text of each pool at a time: requests pile up before `execute`, which needs the
        interpreter that all of them share."""
        for turns in self._pools:
            turns.one_at_a_time(None)

    def end_yielding(self, at_ns: int) -> None:
        """`at_ns`: monotonic."""
        for turns in self._pools:
            turns.one_at_a_time(at_ns)

    def hurry(self, request_id: str) -> None:
        """The texts of this id go next: somebody waits for the end of their requests."""
        for turns in self._pools:
            turns.hurry(request_id)

    def close(self) -> None:
        """Wait for all that was submitted."""
        for turns in self._pools:
            turns.close()
        for thread in self._threads:
            thread.join()

    def _encode(self, prompt: PromptSource, turn: Turn, guide: Guide | None) -> Handover:
        inputs, parameters = [], {}
        if turn.tenant:
            parameters["tenant"] = turn.tenant
        if guide is not None:
            parameters[GRAMMAR] = pack_guide(guide)
        if prompt.text is not None:
            inputs.append(pb_utils.Tensor("text_input", np.array([[prompt.text.encode()]], dtype=np.object_)))
            if not prompt.add_special_tokens:
                inputs.append(pb_utils.Tensor("add_special_tokens", np.zeros((1, 1), np.bool_)))
        elif prompt.chat is None:
            inputs.append(pb_utils.Tensor("input_ids", np.zeros((1, 1), np.int32)))
        else:
            # A request without any tensor cannot be made; `stop` false says nothing.
            inputs.append(pb_utils.Tensor("stop", np.zeros((1, 1), np.bool_)))
            parameters["messages"] = prompt.chat
            if prompt.tools is not None:
                parameters["tools"] = prompt.tools
        request = pb_utils.InferenceRequest(
            model_name=self._model_name,
            requested_output_names=handover.CALL_OUTPUTS,
            inputs=inputs,
            request_id=turn.request_id,
            parameters=parameters,
        )
        response = request.exec()
        if response.has_error():
            raise _failure(response.error().message())
        return handover.unpack({tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()})


def _work(turns: TextTurns) -> None:
    while (run := turns.take()) is not None:
        try:
            run()
        except Exception as error:  # what `then` and `failed` raise ends no thread
            log_failure(error)
        finally:
            turns.done()


def _failure(message: str) -> TritandemError:
    """Triton's own words; the tokenizer's come as a refusal."""
    if QUEUE_FULL in message:
        return Saturated("the tokenizer's queue is full", RETRY_AFTER_S)
    return EngineFailed(f"tokenizer: {message}")
