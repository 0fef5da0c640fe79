"""The scheduler's plug and sinks: every request gets exactly one last response, with what it asked for."""

from __future__ import annotations

import gc
import json
import queue
import re
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils
from handed_over import one, received, text
from tritandem.contracts import (
    Chunk,
    Draining,
    FinishReason,
    GenerationRequest,
    Outcome,
    OutputOptions,
    PriorityClass,
    RequestCancelled,
    Saturated,
    Stamps,
    TokenLogprob,
)
from tritandem.scheduler import FinishedRequest
from tritandem.triton_io.bls_tokenizer import BlsTokenizer, error_of
from tritandem.triton_io.finished_calls import FinishedCalls
from tritandem.triton_io.request_decoder import ModelLimits, ReturnOptions
from tritandem.triton_io.scheduler_plug import SchedulerPlug
from tritandem.triton_io.sinks import TritonSink

LIMITS = ModelLimits(100, 1000, (2,), 8, PriorityClass.NORMAL, 0.0, lambda word: [3])
LAST = Chunk("!", 1, FinishReason.LENGTH, Outcome.COMPLETED, 5, 4, -1.5, stamps=Stamps(*range(9)))


class RecordingService:
    def __init__(self) -> None:
        self.taken: list[tuple[GenerationRequest, Any]] = []
        self.arrived = threading.Semaphore(0)
        self.calls: list[str] = []
        self.full: dict[tuple[str, PriorityClass], Saturated] = {}

    def start(self) -> None:
        self.calls.append("start")

    def submit(self, request: GenerationRequest, sink: Any) -> None:
        self.taken.append((request, sink))
        self.arrived.release()

    def stop(self, request_id: str) -> bool:
        self.calls.append(f"stop {request_id}")
        return False

    def refusal(self, tenant: str, priority: PriorityClass) -> Saturated | None:
        return self.full.get((tenant, priority))

    def drain(self, timeout_s: float) -> None:
        self.calls.append(f"drain {timeout_s}")

    def close(self) -> None:
        self.calls.append("close")


class RecordingPublisher:
    def __init__(self, calls: list[str]) -> None:
        self._calls = calls

    def close(self) -> None:
        self._calls.append("publish no more")


@pytest.fixture
def service() -> RecordingService:
    return RecordingService()


@pytest.fixture
def refused() -> queue.Queue[FinishedRequest]:
    """What the plug ended itself, as metrics and log hear of it."""
    return queue.Queue()


@pytest.fixture
def plug(service: RecordingService, refused: queue.Queue[FinishedRequest]) -> SchedulerPlug:
    publisher = RecordingPublisher(service.calls)
    return SchedulerPlug(
        service, BlsTokenizer(9, threads=2), lambda: LIMITS, str, 7.0, refused.put, publisher, FinishedCalls(), "key"
    )


def tokenized(*ids: int, arrays: dict[str, Any] | None = None) -> dict[str, Any]:
    """As the ensemble hands it over."""
    return {
        **({"text_input": text("hi")} if arrays is None else arrays),
        "input_ids": np.array([ids], np.int32),
        "tokenized_ns": np.array([[100, 200]], np.int64),
    }


def tokenizer_says(*ids: int) -> None:
    def encode(request: Any) -> list[Any]:
        arrays = request.arrays()
        if "text_input" in arrays and arrays["text_input"][0][0] == b"bad":
            message = "in model: REJECTED_INVALID: text_input: given 'bad', allowed: something else"
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(message))]
        tensors = [("input_ids", np.array([ids], np.int32)), ("tokenized_ns", np.array([[1, 2]], np.int64))]
        return [pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors])]

    pb_utils.InferenceRequest.models["tokenizer"] = encode


def test_the_ensembles_ids_and_stamps_are_taken(plug: SchedulerPlug, service: RecordingService) -> None:
    request, sender = received(tokenized(5, 6), request_id="abc")
    plug.execute([request])
    [(made, _)] = service.taken
    assert made.input_ids.tolist() == [5, 6]
    assert (made.request_id, made.received_ns, made.tokenized_ns) == ("abc", 100, 200)
    assert not sender.responses


def test_ids_of_the_client_come_through_the_ensemble(plug: SchedulerPlug, service: RecordingService) -> None:
    request, _ = received(tokenized(5, arrays={}))
    plug.execute([request])
    assert service.taken[0][0].input_ids.tolist() == [5]


def test_text_of_a_direct_caller_goes_by_the_tokenizer(plug: SchedulerPlug, service: RecordingService) -> None:
    tokenizer_says(7, 8, 9)
    request, sender = received({"text_input": text("hi")})
    plug.execute([request])
    assert service.arrived.acquire(timeout=5.0)
    assert service.taken[0][0].input_ids.tolist() == [7, 8, 9]
    chat, _ = received({"text_input": text("")}, {"messages": json.dumps([{"role": "user", "content": "a"}])})
    plug.execute([chat])
    assert service.arrived.acquire(timeout=5.0)
    assert not sender.responses


def test_a_refusal_of_the_tokenizer_keeps_its_words(plug: SchedulerPlug, service: RecordingService) -> None:
    tokenizer_says(1)
    request, sender = received({"text_input": text("bad")})
    plug.execute([request])
    [response] = sender.wait_end()
    assert response.error().message() == "REJECTED_INVALID: text_input: given 'bad', allowed: something else"
    assert not service.taken


def test_a_refusal_that_the_ensemble_carries_keeps_its_words_too(plug: SchedulerPlug) -> None:
    words = "REJECTED_INVALID: text_input: given '', allowed: at least one character"
    full = "REJECTED_SATURATED: 9 texts are waiting for the tokenizer; retry after 1.0 s"
    for refusal, message in ((words, words), (full, full), ("FAILED: secret", "FAILED: tokenizer: FAILED: secret")):
        request, sender = received(tokenized(-1) | {"refusal": text(refusal)})
        plug.execute([request])
        assert sender.wait_end()[0].error().message() == message
    taken, sender = received(tokenized(1) | {"refusal": text("")})
    plug.execute([taken])
    assert not sender.responses


def test_what_never_reached_the_service_is_recorded_once(
    plug: SchedulerPlug, refused: queue.Queue[FinishedRequest]
) -> None:
    tokenizer_says(*range(100))
    cases = {
        "by the tokenizer": {"text_input": text("bad"), "priority": text("batch")},
        "too long": {"text_input": text("long"), "priority": text("batch")},
        "undecodable": tokenized(1) | {"top_p": one(7, np.float32)},
        "in the ensemble": tokenized(-1) | {"refusal": text("REJECTED_INVALID: a: given b, allowed: c")},
    }
    for name, arrays in cases.items():
        request, sender = received(arrays, request_id=name)
        plug.execute([request])
        record = refused.get(timeout=5.0)
        [response] = sender.wait_end()
        assert (record.request_id, record.outcome) == (name, Outcome.REJECTED_INVALID)
        assert record.error == response.error().message()
        assert 0 < record.stamps.received_ns <= record.stamps.finished_ns
        assert record.priority is (PriorityClass.BATCH if "priority" in arrays else PriorityClass.NORMAL)
    assert refused.empty()
    plug.execute([received(tokenized(1))[0]])
    assert refused.empty()


def test_limits_are_checked_after_tokenizing(plug: SchedulerPlug) -> None:
    tokenizer_says(*range(100))
    request, sender = received({"text_input": text("long")})
    plug.execute([request])
    assert "text_input: given '100 tokens', allowed: at most 99" in sender.wait_end()[0].error().message()


def test_a_bad_request_harms_no_other_of_its_batch(plug: SchedulerPlug, service: RecordingService) -> None:
    bad, bad_sender = received(tokenized(1) | {"top_p": one(7, np.float32)})
    good, _ = received(tokenized(1))
    plug.execute([bad, good])
    assert "top_p: given 7.0" in bad_sender.wait_end()[0].error().message()
    assert len(service.taken) == 1


HALF_A_CHARACTER = json.dumps({"\ud800": 1})


@pytest.mark.parametrize(
    ("words", "parameters", "message"),
    [
        (HALF_A_CHARACTER, {}, r"REJECTED_INVALID: .*\\ud800"),
        ('{"top_k": 1' + "0" * 310 + "}", {}, "sampling_parameters: given 'an integer of 311 digits'"),
        ('{"temperature": 1' + "0" * 5000 + "}", {}, "sampling_parameters: given 'an integer of 5001 digits'"),
        ('{"temperature": 1' + "0" * 250 + "}", {}, r"temperature: given 1e\+250"),
        ("{}", {"deadline_ms": "\u00b2"}, "deadline_ms: given '\u00b2'"),
        ("{}", {"deadline_ms": "9" * 5000}, "deadline_ms: given '9999"),
        ("{}", {"x" * 100_000: 1}, ": " + "x" * 128 + ": given 'an unknown parameter', allowed: .* traceparent, .*id$"),
        ("{}", {"temprature": 1}, r"temprature: given 'an unknown parameter', .*\(did you mean temperature\?\)$"),
    ],
    ids=[
        "half a character",
        "311 digits",
        "5001 digits",
        "251 digits",
        "superscript",
        "a long deadline",
        "a long name",
        "a misspelt name",
    ],
)
def test_what_no_field_can_hold_is_refused_and_harms_no_other(
    plug: SchedulerPlug, service: RecordingService, words: str, parameters: dict[str, Any], message: str
) -> None:
    bad, bad_sender = received(tokenized(1) | {"sampling_parameters": text(words)}, parameters)
    good, _ = received(tokenized(1))
    plug.execute([bad, good])
    [response] = bad_sender.wait_end()
    assert response.error().code() == "INVALID_ARG"
    assert re.search(message, response.error().message())
    assert len(response.error().message()) < 3000
    assert len(service.taken) == 1


def test_stamps_without_ids_are_refused(plug: SchedulerPlug) -> None:
    request, sender = received({"text_input": text("a"), "tokenized_ns": np.array([[1, 2]], np.int64)})
    plug.execute([request])
    assert "tokenized_ns: given 'without input_ids'" in sender.wait_end()[0].error().message()


def test_whatever_goes_wrong_after_tokenizing_reaches_the_client(
    plug: SchedulerPlug, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> GenerationRequest:
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr("tritandem.triton_io.scheduler_plug.complete", broken)
    tokenizer_says(1)
    request, sender = received({"text_input": text("hi")})
    plug.execute([request])
    assert sender.wait_end()[0].error().message().startswith("FAILED: internal error (OverflowError)")
    pb_utils.Logger.lines.clear()  # the traceback, which belongs there


def test_a_refused_request_is_freed_without_the_collector(plug: SchedulerPlug) -> None:
    request, _ = received(tokenized(1) | {"top_p": one(7, np.float32)})
    freed = weakref.ref(request)
    gc.disable()
    try:
        plug.execute([request])
        del request
        assert freed() is None
    finally:
        gc.enable()


def test_every_field_that_the_tokenizer_names_is_the_clients_error() -> None:
    for name in ("messages[0].role", "", 'a"b', "text_input"):
        error = error_of(f"in ensemble: REJECTED_INVALID: {name}: given 5, allowed: a text")
        assert error.outcome is Outcome.REJECTED_INVALID
        assert str(error) == f"{name}: given 5, allowed: a text"


def test_the_service_starts_with_the_first_request_and_drains_before_it_closes(
    plug: SchedulerPlug, service: RecordingService
) -> None:
    assert not service.calls
    for _ in range(2):
        plug.execute([received(tokenized(1))[0]])
    plug.close()
    assert service.calls == ["start", "drain 7.0", "close", "publish no more"]


def test_stop_is_answered_whether_or_not_the_id_runs(plug: SchedulerPlug, service: RecordingService) -> None:
    for arrays in ({"stop": one(True, np.bool_)}, tokenized(0, arrays={"stop": one(True, np.bool_)})):
        request, sender = received(arrays, request_id="abc")
        plug.execute([request])
        [response] = sender.wait_end()
        assert response.arrays()["outcome"].tolist() == [b"STOPPED"]
    assert service.calls == ["start", "stop abc", "stop abc"]
    by_parameter, sender = received({"stop": one(True, np.bool_)}, {"request_id": "over http"}, request_id="")
    plug.execute([by_parameter])
    assert sender.wait_end()[0].arrays()["outcome"].tolist() == [b"STOPPED"]
    assert service.calls[-1] == "stop over http"
    nameless, sender = received({"stop": one(True, np.bool_)}, request_id="")
    plug.execute([nameless])
    assert "stop: given" in sender.wait_end()[0].error().message()


def test_a_full_queue_refuses_a_text_before_it_is_tokenized(
    plug: SchedulerPlug, service: RecordingService, refused: queue.Queue[FinishedRequest]
) -> None:
    pb_utils.InferenceRequest.models["tokenizer"] = lambda request: pytest.fail("tokenized in vain")
    service.full["greedy", PriorityClass.BATCH] = Saturated("9 requests are waiting", 2.5)
    request, sender = received(
        {"text_input": text("hi")}, {"tenant": "greedy", "priority_class": "batch"}, request_id="abc"
    )
    plug.execute([request])
    [response] = sender.responses
    assert response.error().message() == "REJECTED_SATURATED: 9 requests are waiting; retry after 2.5 s"
    record = refused.get(timeout=1)
    assert (record.request_id, record.tenant, record.priority) == ("abc", "greedy", PriorityClass.BATCH)


def test_a_stop_hurries_the_text_of_its_request(plug: SchedulerPlug, service: RecordingService) -> None:
    tokenizer_says(1, 2)
    go = threading.Event()
    encode = pb_utils.InferenceRequest.models["tokenizer"]
    pb_utils.InferenceRequest.models["tokenizer"] = lambda request: [go.wait(5), *encode(request)][1:]
    for i in range(7):
        plug.execute([received({"text_input": text("hi")}, request_id=f"r{i}")[0]])
    stop, sender = received({"stop": one(True, np.bool_)}, request_id="r6")
    plug.execute([stop])
    assert sender.wait_end()
    go.set()
    for _ in range(7):
        assert service.arrived.acquire(timeout=5)
    order = [request.request_id for request, _ in service.taken]
    assert order.index("r6") <= 2, "only what two threads had in hand was before it"


def test_who_has_the_key_may_drain_and_is_told_when_nothing_is_left(
    plug: SchedulerPlug, service: RecordingService
) -> None:
    for parameters in ({"drain_key": "guess"}, {"drain_key": ""}, {"drain_key": "schlüssel"}):
        request, sender = received({"stop": one(True, np.bool_)}, parameters | {"drain_timeout_ms": 5000})
        plug.execute([request])
        assert "drain_key: given 'another key'" in sender.wait_end()[0].error().message()
    assert service.calls == ["start"]
    request, sender = received({"stop": one(True, np.bool_)}, {"drain_key": "key", "drain_timeout_ms": 5000})
    plug.execute([request])
    texts = [response.arrays()["text_output"][0] for response in sender.wait_end()]
    assert texts == [b"draining", b"drained"]
    assert service.calls[1:] == ["drain 5.0", "close"]


# -- sinks ---------------------------------------------------------------------------------------------


def sink(names: set[str], stream: bool = True, wanted: list[str] | None = None) -> tuple[TritonSink, Any]:
    sender = pb_utils.ResponseSender()
    returns = ReturnOptions(OutputOptions(stream=stream), frozenset(names))
    outputs = ["text_output", "finish_reason", "outcome", "num_output_tokens", "logprobs", "cached_tokens", "stamps"]
    return TritonSink(
        sender, returns, outputs if wanted is None else wanted, lambda token: f"<{token}>", FinishedCalls()
    ), sender


def test_the_last_chunk_carries_final_itself() -> None:
    made, sender = sink({"finish_reason", "num_output_tokens"})
    made.send(Chunk("a", 2))
    assert not sender.ended.is_set()
    made.finish(LAST)
    first, last = sender.wait_end()
    assert {name: array.tolist() for name, array in first.arrays().items()} == {
        "text_output": [b"a"],
        "num_output_tokens": [2],
    }
    assert {name: array.tolist() for name, array in last.arrays().items()} == {
        "text_output": [b"!"],
        "num_output_tokens": [1],
        "finish_reason": [b"length"],
        "outcome": [b"COMPLETED"],
        "cached_tokens": [4],
        "stamps": list(range(9)),
    }


def test_only_outputs_that_the_client_listed_are_made() -> None:
    made, sender = sink({"finish_reason", "num_output_tokens"}, wanted=["text_output"])
    made.finish(LAST)
    assert set(sender.wait_end()[0].arrays()) == {"text_output"}


def test_nothing_follows_the_end_and_one_response_stays_one() -> None:
    made, sender = sink(set())
    made.fail(RequestCancelled("gone"))
    for late in (lambda: made.send(Chunk("x", 1)), lambda: made.finish(LAST), lambda: made.fail(Draining())):
        with pytest.raises(RuntimeError):
            late()
    assert len(sender.responses) == 1
    single, _ = sink(set(), stream=False)
    with pytest.raises(RuntimeError):
        single.send(Chunk("x", 1))


@pytest.mark.parametrize(
    ("error", "code", "word"),
    [(RequestCancelled("gone"), "CANCELLED", "CANCELLED: gone"), (Draining(), "UNAVAILABLE", "REJECTED_SATURATED: ")],
)
def test_errors_carry_the_outcome_word_and_tritons_code(error: Any, code: str, word: str) -> None:
    made, sender = sink(set())
    made.fail(error)
    [response] = sender.wait_end()
    assert response.error().code() == code
    assert response.error().message().startswith(word)


def test_cancelled_asks_triton_only_while_the_request_lives() -> None:
    made, sender = sink(set())
    sender.gone = True
    assert made.cancelled()
    made.fail(RequestCancelled("gone"))
    assert not made.cancelled()


def test_the_last_response_waits_for_a_question_under_way() -> None:
    made, sender = sink(set())
    asked, answer, finished = threading.Event(), threading.Event(), threading.Event()

    def is_cancelled() -> bool:
        asked.set()
        assert answer.wait(5.0)
        assert not sender.ended.is_set(), "asked about a request that Triton has freed"
        return False

    sender.is_cancelled = is_cancelled
    asking = threading.Thread(target=made.cancelled)
    ending = threading.Thread(target=lambda: (made.finish(LAST), finished.set()))
    asking.start()
    assert asked.wait(5.0)
    ending.start()
    assert not finished.wait(0.05)
    answer.set()
    for thread in (asking, ending):
        thread.join(5.0)
    assert finished.is_set()


def test_logprobs_are_written_as_the_vllm_backend_writes_them() -> None:
    made, sender = sink({"logprobs"})
    chosen_second = TokenLogprob(5, -1.0, ((9, -0.5), (5, -1.0)))
    not_listed = TokenLogprob(7, -4.0, ((9, -0.5),))
    made.send(Chunk("a", 2, logprobs=(chosen_second, not_listed)))
    first, second = json.loads(sender.responses[0].arrays()["logprobs"][0])
    assert list(first) == ["5", "9"]
    assert first["5"] == {"logprob": -1.0, "rank": 2, "decoded_token": "<5>"}
    assert first["9"]["rank"] == 1
    assert second["7"]["rank"] is None
