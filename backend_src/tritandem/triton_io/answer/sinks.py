"""Where the chunks of one request go: a ResponseSink over Triton's response sender.

Owns the output tensors and the rule of exactly one FINAL per request. Called from the scheduler's sender
threads, one at a time per request; `send` blocks for a process round trip.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ...contracts.answers import Chunk, Stamps, TokenLogprob
from ...contracts.errors import TritandemError
from ...telemetry.duration_counts import DurationCounts
from ..request.decoder import ReturnOptions
from ..request.schema import OUTPUTS, PERF_OUTPUTS
from ..stub_2_51.finished_calls import FinishedCalls
from .replies import FINAL, send_error

_TYPE_OF_OUTPUT = {
    tensor.name: {"INT64": np.int64, "INT32": np.int32, "FP32": np.float32}[tensor.dtype]
    for tensor in OUTPUTS
    if tensor.name in PERF_OUTPUTS
}
COUNTS, MOST_COUNTS = ("num_input_tokens", "num_output_tokens"), 24
# Outputs of which each of several answers has its own.
PER_SEQUENCE = frozenset(
    (
        "text_output",
        "finish_reason",
        "stop_reason",
        "num_output_tokens",
        "cumulative_logprob",
        "logprobs",
        "cum_log_probs",
        "output_log_probs",
        "used_seed",
        "sequence_index",
        "output_ids",
        "sequence_length",
    )
)


class TritonSink:
    """Sends what the client asked for and nothing else.

    `wanted` are the output names the client listed (Triton fills in all of them when it listed none).
    Raises RuntimeError for anything after the last response, and for a chunk that is not the last when the
    client wants one response: HTTP `generate` fails on a second one.
    """

    def __init__(
        self,
        sender: Any,
        returns: ReturnOptions,
        wanted: Collection[str],
        token_text: Callable[[int], str],
        finished_calls: FinishedCalls,
        send_times: DurationCounts | None = None,
        gaps: DurationCounts | None = None,
        block_tokens: int = 16,
    ) -> None:
        self._sender = sender
        self._send_times, self._gaps, self._sent_ns = send_times, gaps, 0
        self._returns = returns
        self._wanted = frozenset(wanted)
        dialect = returns.dialect
        self._indices = dialect.indices or len(self._wanted) < len(OUTPUTS)
        self._no_indices = self._wanted.isdisjoint(("batch_index", "sequence_index"))
        self._counts: dict[tuple[str, int], Any] = {}  # tensors that have gone out already
        self._echoed_ids = returns.echoed_ids
        self._echoed: set[int | None] = set()  # answers that have begun with them
        self._output_tokens, self._block_tokens = 0, block_tokens
        self._token_text = token_text
        self._ended = False
        # Triton frees what `is_cancelled` asks about when FINAL goes out: asking at that moment ends the server.
        self._ending = threading.Lock()
        self._finished_calls = finished_calls

    def hand_over(self, submit: Callable[[], None]) -> None:
        """Run what gives this sink to its owner. When that raises, the request is answered elsewhere."""
        self._finished_calls.opened(self)
        try:
            submit()
        except BaseException:
            self._end()
            raise

    def send(self, chunk: Chunk) -> None:
        self._check_open()
        if not self._returns.output.stream:
            raise RuntimeError("a second response for a client that wants one")
        self._hand_to_triton(self._response(chunk))

    def finish(self, chunk: Chunk) -> None:
        self._check_open()
        response = self._response(chunk)  # before the end: where it cannot be made, an error still can be sent
        self._end()
        self._hand_to_triton(response, FINAL)

    def fail(self, error: TritandemError) -> None:
        self._end()
        send_error(self._sender, error)

    def cancelled(self) -> bool:
        with self._ending:
            return not self._ended and bool(self._sender.is_cancelled())

    def asked(self) -> bool:
        """A Witness of finished_calls. A yes of `is_cancelled` may be remembered, a no never is."""
        with self._ending:
            return not self._ended and not self._sender.is_cancelled()

    def _hand_to_triton(self, response: Any, flags: int = 0) -> None:
        begun_ns = time.monotonic_ns()
        self._sender.send(response, flags=flags)
        now_ns = time.monotonic_ns()
        if self._send_times is not None:
            self._send_times.note(now_ns - begun_ns)
        if self._gaps is not None and self._sent_ns:
            self._gaps.note(now_ns - self._sent_ns)
        self._sent_ns = now_ns

    def _check_open(self) -> None:
        if self._ended:
            raise RuntimeError("a response after the last one")

    def _end(self) -> None:
        with self._ending:
            self._check_open()
            self._ended = True
        self._finished_calls.closed(self)

    def _response(self, chunk: Chunk) -> Any:
        arrays = self._arrays(chunk)
        if chunk.choices:
            each = [self._arrays(one) for one in chunk.choices]
            arrays |= {name: _joined([one[name] for one in each]) for name in arrays if name in PER_SEQUENCE}
        wanted = self._wanted
        tensors = [self._tensor(name, array) for name, array in arrays.items() if name in wanted]
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def _tensor(self, name: str, array: Any) -> Any:
        """Making one costs more than all else in a short response, and the same few counts come again and again: one
        sink's responses go out one after another, so that they may share them."""
        if name not in COUNTS or array.size > 1:
            return pb_utils.Tensor(name, array)
        key = (name, int(array[0]))
        tensor = self._counts.get(key)
        if tensor is None:
            tensor = pb_utils.Tensor(name, array)
            if len(self._counts) < MOST_COUNTS:
                self._counts[key] = tensor
        return tensor

    def _arrays(self, chunk: Chunk) -> dict[str, Any]:
        arrays = self._every_response(chunk)
        if chunk.finish_reason is not None:
            arrays |= self._last_response(chunk)
        return arrays

    def _every_response(self, chunk: Chunk) -> dict[str, Any]:
        self._output_tokens += chunk.num_output_tokens
        names = self._returns.names
        arrays: dict[str, Any] = {"text_output": _text(chunk.text)}
        if "num_input_tokens" in names:
            arrays["num_input_tokens"] = np.array([chunk.num_input_tokens], np.uint32)
        if "num_output_tokens" in names:
            arrays["num_output_tokens"] = np.array([chunk.num_output_tokens], np.uint32)
        if "cumulative_logprob" in names:
            arrays["cumulative_logprob"] = np.array([chunk.cumulative_logprob], np.float32)
        if "logprobs" in names:
            null = self._returns.null_logprobs
            arrays["logprobs"] = _text("null" if null else logprobs_json(chunk.logprobs, self._token_text))
        if "prompt_logprobs" in names and chunk.prompt_logprobs is not None:
            arrays["prompt_logprobs"] = _text(logprobs_json(chunk.prompt_logprobs, self._token_text))
        if "output_log_probs" in names:
            arrays["cum_log_probs"] = np.array([chunk.cumulative_logprob], np.float32)
            arrays["output_log_probs"] = np.array([[[one.logprob for one in chunk.logprobs]]], np.float32)
        if not self._no_indices and (self._indices or chunk.index is not None or chunk.choices):
            arrays["batch_index"] = np.zeros((1, 1), np.int32)
            arrays["sequence_index"] = np.full((1, 1), chunk.index or 0, np.int32)
        if self._returns.dialect.finish_reason_always and "finish_reason" in names:
            arrays["finish_reason"] = _text("None")
        if self._returns.dialect.token_ids:
            arrays |= self._token_ids(chunk)
        return arrays

    def _token_ids(self, chunk: Chunk) -> dict[str, Any]:
        ids = np.array([one.token_id for one in chunk.logprobs], np.int32)
        if self._echoed_ids is not None and not chunk.choices and chunk.index not in self._echoed:
            ids = np.concatenate((self._echoed_ids, ids))
            self._echoed.add(chunk.index)
        return {"output_ids": ids.reshape(1, 1, -1), "sequence_length": np.array([[len(ids)]], np.int32)}

    def _last_response(self, chunk: Chunk) -> dict[str, Any]:
        arrays: dict[str, Any] = {"cached_tokens": np.array([chunk.cached_tokens], np.uint32)}
        if "finish_reason" in self._returns.names and chunk.finish_reason is not None:
            arrays["finish_reason"] = _text(chunk.finish_reason.value)
        if "stop_reason" in self._returns.names:
            arrays["stop_reason"] = _text(json.dumps(chunk.stop_reason))
        if "used_seed" in self._returns.names:
            arrays["used_seed"] = np.array([chunk.seed], np.uint64)
        if "arrival_time_ns" in self._returns.names and chunk.stamps is not None:
            arrays |= self._performance(chunk, chunk.stamps)
        if chunk.outcome is not None:
            arrays["outcome"] = _text(chunk.outcome.value)
        if chunk.stamps is not None:
            arrays["stamps"] = np.array(astuple(chunk.stamps), np.int64)
        return arrays

    def _performance(self, chunk: Chunk, stamps: Stamps) -> dict[str, Any]:
        total = -(-(chunk.num_input_tokens + self._output_tokens) // self._block_tokens)
        reused = chunk.cached_tokens // self._block_tokens
        times = (stamps.received_ns, stamps.dispatched_ns, stamps.first_token_ns, stamps.last_token_ns)
        values = (*times, reused, total - reused, total, 0.0, 0, 0)
        return {
            name: np.array([[value]], _TYPE_OF_OUTPUT[name]) for name, value in zip(PERF_OUTPUTS, values, strict=True)
        }


def logprobs_json(logprobs: Collection[TokenLogprob], token_text: Callable[[int], str]) -> str:
    """As the vLLM backend writes it: a list with one {id: {logprob, rank, decoded_token}} per token.

    The chosen token comes first; its rank, when it is not among the reported alternatives, is the one after theirs:
    the least that it can be. A prompt's first token has null for both.
    """
    tokens = []
    for one in logprobs:
        ranks = {token_id: (rank, logprob) for rank, (token_id, logprob) in enumerate(one.top, start=1)}
        rank_of_chosen = ranks[one.token_id][0] if one.token_id in ranks else len(ranks) + 1
        rank = None if one.logprob is None else rank_of_chosen
        entry = {one.token_id: (rank, one.logprob), **ranks}
        tokens.append(
            {
                str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": token_text(token_id)}
                for token_id, (rank, logprob) in entry.items()
            }
        )
    return json.dumps(tokens)


def _joined(arrays: Sequence[Any]) -> Any:
    """Of several answers, side by side: single values [1] become [n], rows of tokens [1, 1, T] become [1, n, longest],
    filled with 0 as the TensorRT-LLM backend does."""
    if arrays[0].ndim < 3:
        return np.concatenate(arrays, axis=-1)
    longest = max(array.shape[-1] for array in arrays)
    padded = [np.pad(array, ((0, 0), (0, 0), (0, longest - array.shape[-1]))) for array in arrays]
    return np.concatenate(padded, axis=1)


def _text(text: str) -> Any:
    return np.array([text.encode()], dtype=np.object_)
