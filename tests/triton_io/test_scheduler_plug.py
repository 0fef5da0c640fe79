"""The scheduler's plug and sinks: every request gets exactly one last response, with what it asked for."""

from __future__ import annotations

import dataclasses
import gc
import json
import queue
import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils
from tritandem.contracts.answers import Chunk, Stamps, TokenLogprob
from tritandem.contracts.errors import (
    Draining,
    EngineFailed,
    InvalidRequest,
    Outcome,
    RequestCancelled,
    Saturated,
    TritandemError,
)
from tritandem.contracts.requests import GenerationRequest, OutputOptions, PriorityClass
from tritandem.contracts.stream import FinishReason
from tritandem.scheduler import FinishedRequest
from tritandem.triton_io.answer.sinks import TritonSink
from tritandem.triton_io.hops import handover
from tritandem.triton_io.hops.bls_tokenizer import BlsTokenizer
from tritandem.triton_io.hops.handover import FRESH_NS, Handover
from tritandem.triton_io.hops.inner_key import InnerKey
from tritandem.triton_io.hops.text_turns import TextTurns
from tritandem.triton_io.plugs.scheduler import FULL_BATCH, SchedulerPlug
from tritandem.triton_io.plugs.tokenizer import TokenizerPlug
from tritandem.triton_io.request.decoder import ModelLimits, ReturnOptions
from tritandem.triton_io.stub_2_51.finished_calls import FinishedCalls

from tests.triton_io.bad_requests import BAD, HI
from tests.triton_io.handed_over import KEY, answered_by, one, received, text
from tests.triton_io.test_tokenizer_plug import SlowForLongTexts

LIMITS = ModelLimits(100, 1000, (2,), 8, PriorityClass.NORMAL, 0.0, lambda word: [3], str, {})
REFUSED = InvalidRequest("text_input", "bad", "something else")
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
def plug(service: RecordingService, refused: queue.Queue[FinishedRequest]) -> Iterator[SchedulerPlug]:
    with closing(plug_of(service, refused.put)) as plug:
        yield plug


def plug_of(service: RecordingService, refused: Callable[[FinishedRequest], None]) -> SchedulerPlug:
    return SchedulerPlug(
        service=service,
        tokenizer=BlsTokenizer(9, threads=2),
        limits=lambda: LIMITS,
        token_text=str,
        drain_timeout_s=7.0,
        refused=refused,
        publisher=RecordingPublisher(service.calls),
        finished_calls=FinishedCalls(),
        key=KEY,
        drain_key="key",
    )


def tokenized(
    *ids: int,
    arrays: dict[str, Any] | None = None,
    refusal: TritandemError | None = None,
    age_ns: int = 100,
    key: InnerKey = KEY,
) -> dict[str, Any]:
    """As the ensemble hands it over; no two are the same."""
    now_ns = time.monotonic_ns() - age_ns
    handed = handover.pack(Handover(np.array(ids, np.int32), now_ns - 100, now_ns, refusal), key)
    return ({"text_input": text("hi")} if arrays is None else arrays) | handed


def tokenizer_says(*ids: int) -> None:
    def encode(request: Any) -> list[Any]:
        arrays = request.arrays()
        bad = "text_input" in arrays and arrays["text_input"][0][0] == b"bad"
        handed = tokenized(*ids, arrays={}, refusal=REFUSED if bad else None)
        return [pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in handed.items()])]

    pb_utils.InferenceRequest.models["tokenizer"] = encode


def test_the_ensembles_ids_and_stamps_are_taken(plug: SchedulerPlug, service: RecordingService) -> None:
    arrays = tokenized(5, 6)
    request, sender = received(dict(arrays), request_id="abc")
    plug.execute([request])
    [(made, _)] = service.taken
    assert made.input_ids.tolist() == [5, 6]
    assert [made.received_ns, made.tokenized_ns] == arrays["tokenized_ns"][0][:2].tolist()
    assert made.request_id == "abc"
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


@pytest.mark.parametrize(
    "refusal", [REFUSED, Saturated("9 texts are waiting", 1.0), EngineFailed("no memory")], ids=str
)
def test_a_refusal_that_the_ensemble_carries_keeps_its_words_too(plug: SchedulerPlug, refusal: TritandemError) -> None:
    request, sender = received(tokenized(-1, refusal=refusal))
    plug.execute([request])
    assert sender.wait_end()[0].error().message() == refusal.public_message()


def forgeries() -> dict[str, dict[str, Any]]:
    """What clients may send in the place of the ensemble."""
    sealed = tokenized(5, 6)
    early = sealed["tokenized_ns"] - np.array([[10**12, 0, 0, 0, 0]])
    words = "REJECTED_INVALID: : given " * 8000
    return {
        "stamps without a seal": sealed | {"tokenized_ns": np.array([[1, 2, 3, 0, 0]])},
        "other stamps": sealed | {"tokenized_ns": early},
        "another refusal": sealed | {"refusal": text('["EngineFailed", "no"]')},
        "another server's": tokenized(5, 6, key=InnerKey(b"of another server")),
        "stamps alone": {name: sealed[name] for name in ("text_input", "input_ids", "tokenized_ns")},
        "no ids": {name: sealed[name] for name in ("text_input", "refusal", "tokenized_ns")},
        "a refusal alone": {"refusal": text(words)},
        "a refusal beside a text": {"text_input": text("hi"), "refusal": text("")},
        "a long refusal": sealed | {"refusal": text("x" * 10_000_000)},
        "no words": sealed | {"refusal": np.empty((1, 0), np.object_)},
        "stamps of another shape": sealed | {"tokenized_ns": np.array([[1, 2]])},
        "stamps of another dtype": sealed | {"tokenized_ns": sealed["tokenized_ns"].astype(np.int32)},
    }


@pytest.mark.parametrize("name", forgeries())
def test_what_the_tokenizer_has_not_said_is_refused_by_name_and_harms_no_other(
    plug: SchedulerPlug, service: RecordingService, name: str
) -> None:
    forged, sender = received(forgeries()[name])
    honest, _ = received(tokenized(1))
    begun_s = time.thread_time()
    plug.execute([forged, honest])
    assert time.thread_time() - begun_s < 0.5
    [response] = sender.wait_end()
    assert response.error().code() == "INVALID_ARG"
    assert re.match("REJECTED_INVALID: (tokenized_ns|refusal): given", response.error().message())
    assert len(response.error().message()) < 500
    assert [made.input_ids.tolist() for made, _ in service.taken] == [[1]]


def test_what_the_tokenizer_said_counts_once(plug: SchedulerPlug, service: RecordingService) -> None:
    arrays = tokenized(5, 6)
    (first, _), (again, sender) = received(dict(arrays)), received(dict(arrays))
    plug.execute([first])
    plug.execute([again])
    assert "tokenized_ns: given 'what another request has brought'" in sender.wait_end()[0].error().message()
    assert len(service.taken) == 1


def test_seals_are_remembered_as_long_as_they_count() -> None:
    handovers, begun_ns = handover.SealedHandovers(KEY), 10**15
    for minute in range(10):
        now_ns = begun_ns + minute * (FRESH_NS // 2)
        fresh = handover.pack(Handover(np.array([minute], np.int32), now_ns, now_ns), KEY)
        assert handovers.take(dict(fresh), now_ns) is not None
        with pytest.raises(InvalidRequest):
            handovers.take(dict(fresh), now_ns + FRESH_NS // 2)
        assert len(handovers._taken) + len(handovers._taken_before) <= 6


def test_stamps_that_were_kept_for_long_make_no_request_older(plug: SchedulerPlug, service: RecordingService) -> None:
    before_ns = time.monotonic_ns()
    plug.execute([received(tokenized(5, age_ns=2 * FRESH_NS))[0]])
    [(made, _)] = service.taken
    assert before_ns <= made.received_ns == made.tokenized_ns <= time.monotonic_ns()


def test_what_never_reached_the_service_is_recorded_once(
    plug: SchedulerPlug, refused: queue.Queue[FinishedRequest]
) -> None:
    tokenizer_says(*range(100))
    cases = {
        "by the tokenizer": {"text_input": text("bad"), "priority": text("batch")},
        "too long": {"text_input": text("long"), "priority": text("batch")},
        "undecodable": tokenized(1) | {"top_p": one(7, np.float32)},
        "in the ensemble": tokenized(-1, refusal=REFUSED),
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


@pytest.mark.parametrize("name", BAD)
def test_no_request_harms_another_whatever_is_wrong_with_it(
    plug: SchedulerPlug, service: RecordingService, refused: queue.Queue[FinishedRequest], name: str
) -> None:
    make, words = BAD[name]
    tokenizer = TokenizerPlug(SlowForLongTexts(), KEY)
    pb_utils.InferenceRequest.models["tokenizer"] = answered_by(tokenizer)
    (first, _), (bad, bad_sender), (last, _) = received(HI), make(), received(HI)
    plug.execute([first, bad, last])
    for _ in range(2):
        assert service.arrived.acquire(timeout=5.0)
    [response] = bad_sender.wait_end()
    assert response.error().code() == "INVALID_ARG"
    assert re.search(words, response.error().message())
    assert len(response.error().message()) < 3000
    record = refused.get_nowait()
    assert record.outcome is Outcome.REJECTED_INVALID
    assert len(record.request_id) <= 256
    assert not pb_utils.Logger.lines, "a client's mistake is no error of the server's"


@pytest.mark.parametrize("arrays", [{"stop": one(True, np.bool_)}, tokenized(0, arrays={"stop": one(True, np.bool_)})])
def test_a_stop_by_an_id_of_any_length_keeps_nothing(
    plug: SchedulerPlug, service: RecordingService, arrays: dict[str, Any]
) -> None:
    for request_id, parameters in (("i" * 2_000_000, {}), ("", {"id": "i" * 2_000_000})):
        request, sender = received(dict(arrays), parameters, request_id=request_id)
        plug.execute([request])
        assert "allowed: a text of at most 256 characters" in sender.wait_end()[0].error().message()
        arrays = {"stop": one(True, np.bool_)}
    assert service.calls == ["start"]


def test_a_refusal_that_cannot_be_recorded_or_sent_harms_no_other(service: RecordingService) -> None:
    def broken(_: FinishedRequest) -> None:
        raise OSError("/opt/secret: no space left")

    (bad, bad_sender), (gone, gone_sender), (good, _) = received({}), received({}), received(tokenized(1))
    gone_sender.ended.set()
    with closing(plug_of(service, broken)) as plug:  # after that every refusal is out, or in the log
        plug.execute([bad, gone, good])
    assert "secret" not in bad_sender.wait_end()[0].error().message()
    assert len(service.taken) == 1
    assert any("no space left" in line for _, line in pb_utils.Logger.lines)
    pb_utils.Logger.lines.clear()


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
        (
            "{}",
            {"x" * 100_000: 1},
            ": " + "x" * 128 + ": given 'an unknown parameter', allowed: .* traceparent, .*top_p, .*or an input$",
        ),
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


def test_whatever_goes_wrong_after_tokenizing_reaches_the_client(
    plug: SchedulerPlug, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> GenerationRequest:
        raise OverflowError("int too large to convert to float")

    monkeypatch.setattr("tritandem.triton_io.plugs.scheduler.complete", broken)
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
        plug.close()  # by now the refusal is out
        assert freed() is None
    finally:
        gc.enable()


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
    [response] = sender.wait_end()
    assert response.error().message() == "REJECTED_SATURATED: 9 requests are waiting; retry after 2.5 s"
    record = refused.get(timeout=1)
    assert (record.request_id, record.tenant, record.priority) == ("abc", "greedy", PriorityClass.BATCH)


def test_a_stop_does_not_wait_for_the_refusals_before_it(plug: SchedulerPlug, service: RecordingService) -> None:
    go = threading.Event()

    class Slow(pb_utils.ResponseSender):
        def send(self, response: Any = None, flags: int = 0) -> None:
            go.wait(5)
            super().send(response, flags)

    service.full["greedy", PriorityClass.NORMAL] = Saturated("9 requests are waiting", 2.5)
    senders = [Slow() for _ in range(50)]
    flood = [
        received({"text_input": text("hi")}, {"tenant": "greedy"}, f"f{i}", sender=senders[i])[0] for i in range(50)
    ]
    stop, sender = received({"stop": one(True, np.bool_)}, request_id="r6")
    plug.execute([*flood, stop])
    assert sender.wait_end()
    assert not any(one.responses for one in senders)
    go.set()
    plug.close()
    assert all(len(one.responses) == 1 for one in senders)


def test_texts_are_tokenized_one_at_a_time_while_full_batches_come(
    plug: SchedulerPlug, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = (Path(__file__).parents[2] / "model_repository/scheduler/config.pbtxt").read_text()
    assert re.search(rf"^max_batch_size: {FULL_BATCH}$", config, re.MULTILINE)
    said: list[int | None] = []
    monkeypatch.setattr(TextTurns, "one_at_a_time", lambda turns, until_ns: said.append(until_ns))
    few, many = FULL_BATCH - 1, FULL_BATCH
    plug.execute([received(tokenized(1))[0] for _ in range(few)])
    assert not said
    before_ns = time.monotonic_ns()
    plug.execute([received(tokenized(1))[0] for _ in range(many)])
    assert said[:3] == [None, None, None]  # short texts, long ones, and grammars
    assert all(until_ns is not None and until_ns > before_ns for until_ns in said[3:])
    assert len(said) == 6


def test_a_stop_hurries_the_text_of_its_request(plug: SchedulerPlug, service: RecordingService) -> None:
    tokenizer_says(1, 2)
    encode = pb_utils.InferenceRequest.models["tokenizer"]
    go = {f"r{i}": threading.Event() for i in range(7)}
    go["r6"].set()
    in_hand = threading.Semaphore(0)

    def held(request: Any) -> list[Any]:
        in_hand.release()
        go[request.arrays()["text_input"][0][0].decode()].wait(60)
        return encode(request)

    pb_utils.InferenceRequest.models["tokenizer"] = held
    for name in go:
        plug.execute([received({"text_input": text(name)}, request_id=name)[0]])
    for _ in range(2):
        assert in_hand.acquire(timeout=60)
    stop, sender = received({"stop": one(True, np.bool_)}, request_id="r6")
    plug.execute([stop])
    assert sender.wait_end()
    go["r0"].set()  # one of the two threads is free, and all texts but the stopped one's would hold it
    for _ in range(2):
        assert service.arrived.acquire(timeout=60)
    assert [request.request_id for request, _ in service.taken] == ["r0", "r6"]
    for event in go.values():
        event.set()


def test_who_has_the_key_may_drain_and_is_told_when_nothing_is_left(
    plug: SchedulerPlug, service: RecordingService
) -> None:
    for parameters in ({"drain_key": "guess"}, {"drain_key": ""}, {"drain_key": "schlüssel\ud800"}):
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


def test_a_last_chunk_that_cannot_be_made_leaves_room_for_an_error() -> None:
    made, sender = sink({"logprobs"})
    with pytest.raises(AttributeError):
        made.finish(dataclasses.replace(LAST, logprobs=("not a logprob",)))  # type: ignore[arg-type]
    made.fail(EngineFailed("a response could not be delivered"))
    [response] = sender.wait_end()
    assert response.error().message() == "FAILED: a response could not be delivered"


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


def test_a_streams_responses_say_whose_text_they_carry() -> None:
    made, sender = sink({"finish_reason"}, wanted=["text_output", "finish_reason", "sequence_index", "used_seed"])
    made.send(Chunk("a", 1, index=1))
    made.send(dataclasses.replace(LAST, index=1))
    assert not sender.ended.is_set()
    made.finish(dataclasses.replace(LAST, index=0))
    assert [response.arrays()["sequence_index"].tolist() for response in sender.wait_end()] == [[[1]], [[1]], [[0]]]


def test_several_answers_in_one_response_stand_side_by_side() -> None:
    names = {"finish_reason", "num_input_tokens", "num_output_tokens", "logprobs", "output_log_probs", "used_seed"}
    wanted = [*names, "text_output", "sequence_index", "cum_log_probs", "outcome", "stamps", "cached_tokens"]
    made, sender = sink(names, stream=False, wanted=wanted)
    tokens = (TokenLogprob(3, -0.5), TokenLogprob(4, -1.5))
    said = [
        dataclasses.replace(LAST, text="ab", num_output_tokens=2, logprobs=tokens, cumulative_logprob=-2.0, seed=5),
        dataclasses.replace(LAST, text="c", logprobs=tokens[:1], cumulative_logprob=-0.5, seed=6),
    ]
    said = [dataclasses.replace(chunk, index=index) for index, chunk in enumerate(said)]
    made.finish(dataclasses.replace(LAST, num_output_tokens=3, choices=tuple(said)))
    [response] = sender.wait_end()
    arrays = response.arrays()
    assert arrays["text_output"].tolist() == [b"ab", b"c"]
    assert arrays["finish_reason"].tolist() == [b"length", b"length"]
    assert arrays["num_output_tokens"].tolist() == [2, 1]
    assert arrays["used_seed"].tolist() == [5, 6]
    assert arrays["sequence_index"].tolist() == [[0, 1]]
    assert arrays["cum_log_probs"].tolist() == [-2.0, -0.5]
    assert arrays["output_log_probs"].tolist() == [[[-0.5, -1.5], [-0.5, 0.0]]]
    assert [len(json.loads(text)) for text in arrays["logprobs"]] == [2, 1]
    assert (arrays["outcome"].tolist(), arrays["stamps"].shape) == ([b"COMPLETED"], (9,)), "of the request"


def test_a_prompts_logprobs_come_once_and_its_first_token_has_none() -> None:
    made, sender = sink({"prompt_logprobs"}, wanted=["prompt_logprobs"])
    made.send(Chunk("a", 1, prompt_logprobs=(TokenLogprob(3, None), TokenLogprob(4, -0.5, ((4, -0.5),)))))
    made.finish(LAST)
    first, second = (response.arrays() for response in sender.responses)
    assert json.loads(first["prompt_logprobs"][0]) == [
        {"3": {"logprob": None, "rank": None, "decoded_token": "<3>"}},
        {"4": {"logprob": -0.5, "rank": 1, "decoded_token": "<4>"}},
    ]
    assert "prompt_logprobs" not in second


def test_logprobs_are_written_as_the_vllm_backend_writes_them() -> None:
    made, sender = sink({"logprobs"})
    chosen_second = TokenLogprob(5, -1.0, ((9, -0.5), (5, -1.0)))
    not_listed = TokenLogprob(7, -4.0, ((9, -0.5),))
    made.send(Chunk("a", 2, logprobs=(chosen_second, not_listed)))
    first, second = json.loads(sender.responses[0].arrays()["logprobs"][0])
    assert list(first) == ["5", "9"]
    assert first["5"] == {"logprob": -1.0, "rank": 2, "decoded_token": "<5>"}
    assert first["9"]["rank"] == 1
    assert second["7"]["rank"] == 2, "the least that it can be"
