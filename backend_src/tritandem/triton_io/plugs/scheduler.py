"""The model `scheduler`: requests of the ensemble (with ids) and of direct callers (with text) -> the service.

Owns decoding, the choice of path and the reply to `stop`. `execute` runs on Triton's thread and never waits
for text, engine or client. Every request gets exactly one last response: from its sink, or from here.
"""

from __future__ import annotations

import contextlib
import hmac
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...contracts.answers import Chunk, Stamps
from ...contracts.arrays import Int32Array
from ...contracts.errors import InvalidRequest, Outcome, Saturated, TritandemError
from ...contracts.requests import GenerationRequest, OutputOptions, PriorityClass
from ...contracts.stream import FinishReason
from ...scheduler.ports import FinishedRequest
from ...scheduler.service import SchedulerService
from ...telemetry.duration_counts import DurationCounts
from ...telemetry.publisher import Publisher
from ..answer.refusals import Refusals
from ..answer.replies import answer_each, public_error
from ..answer.sinks import TritonSink
from ..hops.bls_tokenizer import BlsTokenizer
from ..hops.handover import SealedHandovers
from ..hops.inner_key import InnerKey
from ..hops.recent_keys import RecentKeys
from ..hops.text_turns import Turn
from ..request.decoder import Draft, ModelLimits, ReturnOptions, complete, deadline_ns, decode, read_request_id
from ..request.dialects import take_dialect
from ..request.guides import Guide
from ..request.incoming import read_arrays, read_id, read_parameters_text
from ..request.prompt_source import PromptSource, read_parameters
from ..request.schema import DRAIN_KEY, DRAIN_TIMEOUT_MS
from ..request.tensor_values import Inputs
from ..request.trace_context import read_trace_parent
from ..stub_2_51.finished_calls import FinishedCalls

FULL_BATCH = 64  # `max_batch_size`: so many requests in one call mean that more wait in Triton's queue
YIELD_NS = 20_000_000  # after such a call: the next one comes sooner
REMEMBERED = 4096  # grammars that were tried


class SchedulerPlug:
    """`limits` is called on the first request, when engines can be asked; its answer is kept.

    `refused` hears of every request that ends here instead of in the service. `publisher` has been started, and is
    closed here. `key` is the tokenizer's too. `drain_key` is what a request to drain must carry; empty: nobody may.
    """

    def __init__(
        self,
        *,
        service: SchedulerService,
        tokenizer: BlsTokenizer,
        limits: Callable[[], ModelLimits],
        token_text: Callable[[int], str],
        drain_timeout_s: float,
        refused: Callable[[FinishedRequest], None],
        publisher: Publisher,
        finished_calls: FinishedCalls,
        key: InnerKey,
        drain_key: str = "",
        send_times: DurationCounts | None = None,
        gaps: DurationCounts | None = None,
        exclude_input: str = "streams",
        block_tokens: int = 16,
    ) -> None:
        self._service = service
        self._exclude_input, self._block_tokens = exclude_input, block_tokens
        self._tokenizer = tokenizer
        self._ask_limits = limits
        self._limits: ModelLimits | None = None
        self._token_text = token_text
        self._drain_timeout_s = drain_timeout_s
        self._refused = refused
        self._publisher = publisher
        self._finished_calls = finished_calls
        self._handovers = SealedHandovers(key)
        self._refusals = Refusals()
        self._drain_key = drain_key
        self._send_times, self._gaps = send_times, gaps
        self._tried = RecentKeys(REMEMBERED)
        self._started = False

    def execute(self, requests: Sequence[Any]) -> None:
        received_ns = time.monotonic_ns()
        if more_wait := len(requests) >= FULL_BATCH:
            self._tokenizer.begin_yielding()

        def answer(request: Any, sender: Any) -> None:
            self._start_once()
            self._accept(request, sender, received_ns)

        def refuse(request: Any, sender: Any, error: BaseException) -> None:
            public = public_error(error)
            self._refusals.send(sender, public)
            self._refused(refusal_record(_id_of(request), received_ns, public))

        answer_each(requests, answer, refuse)
        if more_wait:
            self._tokenizer.end_yielding(time.monotonic_ns() + YIELD_NS)

    def close(self) -> None:
        """Running requests finish within the drain timeout; no thread calls into Triton afterwards."""
        self._tokenizer.close()
        if self._started:
            self._service.drain(self._drain_timeout_s)
        self._service.close()
        self._refusals.close()
        self._publisher.close()

    def _start_once(self) -> None:
        """Engines cannot be called while models load, so everything starts with the first request."""
        if not self._started:
            self._service.start()
            self._started = True

    def _model_limits(self) -> ModelLimits:
        if self._limits is None:
            self._limits = self._ask_limits()
        return self._limits

    def _accept(self, request: Any, sender: Any, received_ns: int) -> None:
        """Raises before anything was handed over; afterwards the sink answers."""
        request_id, arrays = read_id(request), read_arrays(request)
        handed = self._handovers.take(arrays, received_ns)
        if handed is not None and handed.refusal is not None:
            raise handed.refusal
        parameters = read_parameters(read_parameters_text(request))
        if handed is not None:
            received_ns = handed.received_ns
            if "text_input" in arrays or "messages" in parameters:
                del arrays["input_ids"]  # the tokenizer's; without either they are the client's own
        trace_parent = read_trace_parent(request, parameters)
        dialect = take_dialect(arrays)
        draft = decode(request_id, Inputs(arrays), parameters, received_ns, trace_parent, dialect, self._exclude_input)
        wanted = request.requested_output_names()
        if DRAIN_KEY in parameters:
            self._drain(parameters, sender, wanted)
            return
        if draft.prompt.stop:
            self._stop(draft.request_id, sender, wanted)
            return
        sink = self._sink(sender, draft.returns, wanted)
        ids = draft.prompt.input_ids if handed is None else handed.ids
        guide = draft.fields.guide
        untried = guide is not None and guide.grammar.key not in self._tried
        if ids is None:
            self._tokenize(draft, sink, sender, guide if untried else None)
            return
        tokenized_ns = received_ns if handed is None else handed.tokenized_ns
        decoded = complete(draft, ids, tokenized_ns, self._model_limits())
        if untried:
            self._tokenize(draft, sink, sender, guide, decoded)
        else:
            sink.hand_over(lambda: self._service.submit(decoded, sink))

    def _sink(self, sender: Any, returns: ReturnOptions, wanted: Sequence[str]) -> TritonSink:
        return TritonSink(
            sender,
            returns,
            wanted,
            self._token_text,
            self._finished_calls,
            send_times=self._send_times,
            gaps=self._gaps,
            block_tokens=self._block_tokens,
        )

    def _tokenize(
        self,
        draft: Draft,
        sink: TritonSink,
        sender: Any,
        guide: Guide | None,
        decoded: GenerationRequest | None = None,
    ) -> None:
        """`guide`: to be tried there. `decoded`: it has its ids, and goes there for its guide alone."""
        limits = self._model_limits()
        priority = limits.default_priority if draft.priority is None else draft.priority

        def failed(error: Exception) -> None:
            public = public_error(error)
            sink.fail(public)
            note(public)

        def note(public: TritandemError) -> None:
            self._refused(
                refusal_record(draft.request_id, draft.received_ns, public, priority, draft.tenant, draft.trace_parent)
            )

        def then(ids: Int32Array, tokenized_ns: int) -> None:
            if guide is not None:
                self._tried.add(guide.grammar.key)
            try:
                request = decoded or complete(draft, ids, tokenized_ns, limits)
            except Exception as error:  # this thread's caller only calls: whatever is wrong must reach the client
                failed(error)
                return
            sink.hand_over(lambda: self._service.submit(request, sink))

        refusal = self._service.refusal(draft.tenant, priority)  # no text is tokenized in vain
        if refusal is None:
            turn = Turn(draft.request_id, draft.tenant, priority, deadline_ns(draft, limits))
            try:
                prompt = draft.prompt if decoded is None else PromptSource(input_ids=decoded.input_ids)
                self._tokenizer.submit(prompt, turn, then, failed, guide, sink.cancelled)
            except Saturated as error:
                refusal = error
        if refusal is not None:
            self._refusals.send(sender, refusal)
            note(refusal)

    def _drain(self, parameters: Mapping[str, Any], sender: Any, wanted: Sequence[str]) -> None:
        """Answers twice: when new requests are refused, and when no request is left."""
        if not (self._drain_key and _same(parameters[DRAIN_KEY], self._drain_key)):
            raise InvalidRequest(DRAIN_KEY, "another key", "the key that this server was started with")
        timeout_s = int(parameters[DRAIN_TIMEOUT_MS]) / 1e3
        sink = self._sink(sender, ReturnOptions(OutputOptions(stream=True)), wanted)

        def run() -> None:
            sink.send(Chunk("draining", 0))
            self._service.drain(timeout_s)
            self._service.close()  # whatever is left ends with an error
            sink.finish(Chunk("drained", 0, finish_reason=FinishReason.STOP, outcome=Outcome.COMPLETED))

        threading.Thread(target=run, name="drain", daemon=True).start()

    def _stop(self, request_id: str, sender: Any, wanted: Sequence[str]) -> None:
        if not request_id:
            raise InvalidRequest("stop", "a request without an id", "the id of the request to end")
        self._service.stop(request_id)
        self._tokenizer.hurry(request_id)
        returns = ReturnOptions(OutputOptions(), frozenset({"finish_reason"}))
        sink = self._sink(sender, returns, wanted)
        sink.finish(Chunk("", 0, finish_reason=FinishReason.CANCELLED, outcome=Outcome.STOPPED))


def refusal_record(
    request_id: str,
    received_ns: int,
    error: TritandemError,
    priority: PriorityClass = PriorityClass.NORMAL,
    tenant: str = "",
    trace_parent: str = "",
) -> FinishedRequest:
    """For metrics and log: a request that ended before the service knew it."""
    return FinishedRequest(
        request_id=request_id,
        outcome=error.outcome,
        priority=priority,
        tenant=tenant,
        stamps=Stamps(received_ns=received_ns, finished_ns=time.monotonic_ns()),
        num_input_tokens=0,
        num_output_tokens=0,
        cached_tokens=0,
        num_responses=1,
        engine="",
        error=error.public_message(),
        trace_parent=trace_parent,
    )


def _same(given: Any, key: str) -> bool:
    """In a time that tells nothing about the key; of texts, hmac takes those of ASCII letters only."""
    return hmac.compare_digest(str(given).encode("utf-8", "surrogatepass"), key.encode())


def _id_of(request: Any) -> str:
    """Of a request that is refused, perhaps because of its id or its parameters; "": none that could be kept."""
    request_id = ""
    with contextlib.suppress(Exception):
        request_id = read_id(request)
        request_id = read_request_id(request_id, read_parameters(read_parameters_text(request)))
    return request_id
