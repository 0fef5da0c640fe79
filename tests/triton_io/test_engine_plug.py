"""The engine's hop from end to end: a port on one side, a service on the other, Triton's part faked."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import triton_python_backend_utils as pb_utils
from tritandem.contracts.errors import ConfigError, Draining, EngineFailed, InvalidRequest, TritandemError
from tritandem.contracts.fields import SamplingParams
from tritandem.contracts.requests import EngineRequest
from tritandem.contracts.stream import FinishCode, LoadSnapshot, TokenBatch
from tritandem.triton_io.hops import bls_engine, engine_wire
from tritandem.triton_io.hops.bls_engine import BlsEngine
from tritandem.triton_io.hops.engine_wire import Op
from tritandem.triton_io.hops.inner_key import InnerKey
from tritandem.triton_io.plugs import engine_calls as call_relay
from tritandem.triton_io.plugs.engine import EnginePlug
from tritandem.triton_io.plugs.engine_calls import CallRelay
from tritandem.triton_io.stub_2_51.finished_calls import FinishedCalls
from tritandem.triton_io.stub_2_51.stream_gate import StreamGate

from tests.triton_io.handed_over import KEY, received

IDLE_S = 0.2


class ScriptedService:
    """One token a call of `step` for every live sequence; `next_batch` joins what has not been taken."""

    def __init__(self) -> None:
        self.sequences: dict[int, int] = {}
        self.cancelled: list[int] = []
        self.closed = False
        self._ready: deque[tuple[int, FinishCode]] = deque()
        self._news = threading.Condition()

    def submit(self, requests: list[EngineRequest]) -> list[TritandemError | None]:
        answers: list[TritandemError | None] = []
        for request in requests:
            if request.seq_id in self.sequences:
                answers.append(InvalidRequest("seq_id", request.seq_id, "an id that is not in use"))
                continue
            self.sequences[request.seq_id] = request.sampling.max_tokens
            answers.append(None)
        return answers

    def step(self) -> None:
        with self._news:
            for seq_id in list(self.sequences):
                self.sequences[seq_id] -= 1
                last = self.sequences[seq_id] == 0
                self._ready.append((seq_id, FinishCode.LENGTH if last else FinishCode.RUNNING))
                if last:
                    del self.sequences[seq_id]
            self._news.notify_all()

    def cancel(self, seq_ids: Sequence[int]) -> None:
        self.cancelled.extend(seq_ids)

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(running=len(self.sequences), max_context_tokens=77)

    def live(self) -> int:
        with self._news:
            return len(self.sequences) + len(self._ready)

    def next_batch(self, timeout_s: float) -> TokenBatch | None:
        with self._news:
            if not self._news.wait_for(lambda: bool(self._ready), timeout_s):
                return None
            rows = list(self._ready)
            self._ready.clear()
        return TokenBatch(
            seq_ids=np.array([seq_id for seq_id, _ in rows], np.int64),
            token_counts=np.ones(len(rows), np.int32),
            tokens=np.arange(len(rows), dtype=np.int32),
            finish=np.array([code for _, code in rows], np.uint8),
            cached_tokens=np.zeros(len(rows), np.int32),
            stamps_ns=np.ones((len(rows), 4), np.int64),
            load=self.load(),
        )

    def close(self) -> None:
        assert not self.closed
        self.closed = True


def sequence(seq_id: int, max_tokens: int = 3) -> EngineRequest:
    return EngineRequest(seq_id, np.array([1, 2, 3], np.int32), SamplingParams(max_tokens=max_tokens))


@pytest.fixture
def service() -> ScriptedService:
    return ScriptedService()


@pytest.fixture
def plug(service: ScriptedService) -> Any:
    made = EnginePlug(service, IDLE_S, KEY)
    yield made
    if not service.closed:
        made.close()


@pytest.fixture
def port(plug: EnginePlug) -> BlsEngine:
    """Calls of the port reach the plug as Triton would carry them: the stream directly, the rest by the relay."""

    def relay(request: Any) -> list[Any]:
        forwarded, sender = received(request.arrays())
        CallRelay("engine_calls", KEY).execute([forwarded])
        responses: list[Any] = sender.wait_end()
        return responses

    pb_utils.InferenceRequest.models["engine_calls"] = relay

    def carry(request: Any) -> Iterator[Any]:
        forwarded, sender = received(request.arrays())
        plug.execute([forwarded])
        return responses_of(sender)

    pb_utils.InferenceRequest.models["engine"] = carry
    pb_utils.InferenceRequest.decoupled.add("engine")
    return BlsEngine("engine", KEY, FinishedCalls(), StreamGate())


def open_stream(plug: EnginePlug, sender: Any = None) -> Any:
    request, sender = received({"header": KEY.lock(engine_wire.pack_call(Op.STREAM))}, sender=sender)
    plug.execute([request])
    return sender


def responses_of(sender: Any) -> Iterator[Any]:
    """As they come, to the last one."""
    for count in itertools.count(1):
        yield sender.wait(count)[count - 1]
        if sender.ended.is_set() and len(sender.responses) == count:
            return


def rows_of(responses: Sequence[Any]) -> list[int]:
    """Of every batch; the greeting, signs of life and the end are empty."""
    return [int(response.arrays()["header"][0]) for response in responses if response.arrays()]


def test_submit_answers_for_each_sequence(port: BlsEngine, service: ScriptedService) -> None:
    assert port.submit([sequence(1), sequence(2)]) == [None, None]
    again, fresh = port.submit([sequence(1), sequence(3)])
    assert isinstance(again, InvalidRequest)
    assert str(again) == "seq_id: given 1, allowed: an id that is not in use"
    assert fresh is None
    assert set(service.sequences) == {1, 2, 3}


def test_load_and_cancel_reach_the_service(port: BlsEngine, service: ScriptedService) -> None:
    assert port.load() == LoadSnapshot(max_context_tokens=77)
    port.cancel([5, 6])
    assert service.cancelled == [5, 6]


def test_a_stream_carries_every_token_once_and_ends_when_idle(port: BlsEngine, service: ScriptedService) -> None:
    port.submit([sequence(1, 3), sequence(2, 2)])
    for _ in range(3):
        service.step()
    batches = list(port.stream())
    seen = [(int(i), FinishCode(int(f))) for b in batches for i, f in zip(b.seq_ids, b.finish, strict=True)]
    assert [i for i, _ in seen] == [1, 2, 1, 2, 1]
    assert [pair for pair in seen if pair[1] is not FinishCode.RUNNING] == [
        (2, FinishCode.LENGTH),
        (1, FinishCode.LENGTH),
    ]


def test_a_blocked_receiver_costs_message_size_and_no_step(plug: EnginePlug, service: ScriptedService) -> None:
    service.submit([sequence(1, 50)])
    entered, released = threading.Semaphore(0), threading.Event()

    def block() -> None:
        if sender.responses:  # the greeting passes
            entered.release()
            assert released.wait(5.0)

    sender = pb_utils.ResponseSender(block)
    open_stream(plug, sender)
    service.step()
    assert entered.acquire(timeout=5.0)
    for _ in range(49):
        service.step()
    released.set()
    responses = sender.wait_end()
    assert responses[0].arrays() == responses[-1].arrays() == {}
    assert rows_of(responses) in ([1, 49], [50])  # what was blocked: the first batch, or a sign of life before it


def test_a_second_stream_ends_the_first(plug: EnginePlug, service: ScriptedService) -> None:
    first = open_stream(plug)
    second = open_stream(plug)
    assert rows_of(first.wait_end()) == []
    service.submit([sequence(1, 1)])
    service.step()
    assert rows_of(second.wait_end()) == [1]


def test_a_stream_with_live_sequences_outlasts_the_idle_time(plug: EnginePlug, service: ScriptedService) -> None:
    service.submit([sequence(1, 1)])
    sender = open_stream(plug)
    assert not sender.ended.wait(3 * IDLE_S)
    service.step()
    assert rows_of(sender.wait_end()) == [1]


def test_a_stream_with_nothing_to_say_gives_signs_of_life(plug: EnginePlug, service: ScriptedService) -> None:
    service.submit([sequence(1, 1)])
    sender = open_stream(plug)
    assert all(response.arrays() == {} for response in sender.wait(3))


def test_closing_ends_stream_and_service_in_that_order(plug: EnginePlug, service: ScriptedService) -> None:
    service.submit([sequence(1, 9)])
    sender = open_stream(plug)
    plug.close()
    assert sender.ended.is_set()
    assert service.closed


def test_a_malformed_call_is_answered_and_the_next_one_served(plug: EnginePlug) -> None:
    bad, bad_sender = received({"header": KEY.lock(np.array([99], np.int64))})
    good, good_sender = received({"header": KEY.lock(engine_wire.pack_call(Op.LOAD))})
    plug.execute([bad, good])
    assert "FAILED" in bad_sender.wait_end()[0].error().message()
    assert engine_wire.unpack_load(good_sender.wait_end()[0].arrays()["header"]).max_context_tokens == 77
    pb_utils.Logger.lines.clear()


STRANGERS = [
    engine_wire.pack_call(Op.STREAM),
    engine_wire.pack_call(Op.CANCEL, range(1, 3000)),
    engine_wire.pack_call(Op.END_STREAM),
    engine_wire.pack_call(Op.LOAD),
    engine_wire.pack_submit([sequence(2)])[0],
    InnerKey(b"of another server").lock(engine_wire.pack_call(Op.STREAM)),
    np.zeros(0, np.int64),
]


@pytest.mark.parametrize("header", STRANGERS, ids=range(len(STRANGERS)))
def test_a_stranger_is_refused_in_one_response_and_nothing_else_happens(
    plug: EnginePlug, service: ScriptedService, header: Any
) -> None:
    service.submit([sequence(1, 2)])
    stream = open_stream(plug)
    service.step()
    strange = {"header": header, "tokens": np.arange(99, dtype=np.int32)}
    relay = CallRelay("engine_calls", KEY)  # the engine is not even asked: there is none of that name here
    for model in (plug, relay):
        request, sender = received(strange, {"engine": "engine_calls"})
        model.execute([request])
        [response] = sender.wait_end()
        assert response.error().code() == "INVALID_ARG"
        assert response.error().message().startswith("REJECTED_INVALID: header: given 'a call without the key")
    service.step()
    assert sum(rows_of(stream.wait_end())) == 2
    assert not service.cancelled


def test_a_relay_calls_the_engine_that_it_is_named_after() -> None:
    called: list[str] = []
    for name in ("engine", "engine_1", "engine_calls"):
        pb_utils.InferenceRequest.models[name] = lambda _request, name=name: called.append(name) or []
        pb_utils.InferenceRequest.decoupled.add(name)
    request, sender = received({"header": KEY.lock(engine_wire.pack_call(Op.LOAD))}, {"engine": "engine_calls"})
    CallRelay("engine_1_calls", KEY).execute([request])
    assert called == ["engine_1"]
    assert "engine_1 gave no answer" in sender.wait_end()[0].error().message()
    for nameless in ("engine", "_calls"):
        with pytest.raises(ConfigError, match="named after its engine"):
            CallRelay(nameless, KEY)


BROKEN = pb_utils.InferenceResponse(error=pb_utils.TritonError("stub process is not healthy"))
STOPPING = pb_utils.InferenceResponse(error=pb_utils.TritonError("Error when running inference: Server not ready"))


def test_an_engine_that_breaks_is_engine_failed(port: BlsEngine) -> None:
    def unreachable(_request: Any) -> list[Any]:
        raise pb_utils.TritonModelException("model 'engine' is not found")

    def broken(_request: Any) -> list[Any]:
        return [BROKEN]

    for failure, words in ((broken, "not healthy"), (unreachable, "not found"), (lambda _request: [], "no answer")):
        pb_utils.InferenceRequest.models["engine"] = failure
        for call in (port.load, lambda: port.submit([sequence(1)]), lambda: port.cancel([1])):
            with pytest.raises(EngineFailed, match=words):
                call()
    pb_utils.InferenceRequest.models["engine"] = broken
    with pytest.raises(EngineFailed, match="not healthy"):
        list(port.stream())


def test_a_relay_that_breaks_is_engine_failed(port: BlsEngine) -> None:
    pb_utils.InferenceRequest.models["engine_calls"] = lambda _request: [BROKEN]
    with pytest.raises(EngineFailed, match="not healthy"):
        port.load()


def test_calls_that_a_stopping_server_refuses_leave_the_streams_alone(port: BlsEngine) -> None:
    before = port.load()
    pb_utils.InferenceRequest.models["engine_calls"] = lambda _request: [STOPPING]
    assert port.load() == before
    port.cancel([1])
    [refusal] = port.submit([sequence(1)])
    assert isinstance(refusal, Draining)


def open_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every call to the engine that is made from now on."""
    calls: list[Any] = []
    made = pb_utils.InferenceRequest.exec

    def recorded(request: Any, decoupled: bool = False) -> Any:
        result = made(request, decoupled)
        if decoupled and KEY.unlock(request.arrays()["header"])[0] == Op.STREAM:
            calls.append(result)
        return result

    monkeypatch.setattr(pb_utils.InferenceRequest, "exec", recorded)
    return calls


def tokens_one_by_one(stream: Iterator[TokenBatch], service: ScriptedService, count: int) -> list[int]:
    """How many rows each of `count` steps brought."""
    rows = []
    for _ in range(count):
        service.step()
        rows.append(len(next(stream).seq_ids))
    return rows


def test_a_long_stream_goes_on_in_further_calls_without_losing_a_token(
    port: BlsEngine, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bls_engine, "ROTATE_AFTER_RESPONSES", 2)
    calls = open_calls(monkeypatch)
    service.submit([sequence(1, 6)])
    stream = port.stream()
    assert tokens_one_by_one(stream, service, 6) == [1] * 6
    assert list(stream) == []
    assert len(calls) in (3, 4)  # a call may still bring what its engine had taken when the next one opened
    assert all(call.ended for call in calls)


def test_large_batches_end_a_call_before_its_time(
    port: BlsEngine, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bls_engine, "ROTATE_AFTER_BYTES", 1)
    calls = open_calls(monkeypatch)
    service.submit([sequence(1, 3)])
    assert tokens_one_by_one(port.stream(), service, 3) == [1] * 3
    assert len(calls) > 1


def test_a_stream_that_cannot_go_on_in_another_call_stays_in_this_one(
    port: BlsEngine, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bls_engine, "ROTATE_AFTER_RESPONSES", 2)
    service.submit([sequence(1, 9)])
    stream = port.stream()
    assert tokens_one_by_one(stream, service, 1) == [1]
    pb_utils.InferenceRequest.models["engine"] = lambda _request: [STOPPING]
    assert tokens_one_by_one(stream, service, 8) == [1] * 8
    assert list(stream) == []


def test_a_stream_that_is_left_is_ended_and_read_to_its_end(
    port: BlsEngine, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = open_calls(monkeypatch)
    service.submit([sequence(1, 9)])
    stream = port.stream()
    tokens_one_by_one(stream, service, 2)
    stream.close()  # type: ignore[attr-defined]
    assert [call.ended for call in calls] == [True]


def test_a_new_reader_makes_one_leave_that_waits_in_the_stream(port: BlsEngine, service: ScriptedService) -> None:
    service.submit([sequence(1, 9)])
    first, second = port.stream(), port.stream()
    taken, replaced = threading.Event(), threading.Event()

    def read(stream: Iterator[TokenBatch], news: threading.Event) -> None:
        for _ in stream:
            news.set()

    service.step()
    leaving = threading.Thread(target=read, args=(first, taken))
    leaving.start()
    assert taken.wait(5.0)
    staying = threading.Thread(target=read, args=(second, replaced))
    staying.start()
    leaving.join(5.0)
    assert not leaving.is_alive()
    assert not replaced.is_set()
    for _ in range(8):
        service.step()
    staying.join(5.0)
    assert not staying.is_alive()
    assert replaced.is_set()


def test_a_relay_keeps_few_finished_calls(plug: EnginePlug, port: BlsEngine) -> None:
    relay = CallRelay("engine_calls", KEY)
    for _ in range(3 * call_relay.KEPT_CALLS):
        request, _ = received({"header": KEY.lock(engine_wire.pack_call(Op.LOAD))})
        relay.execute([request])
        assert len(relay._finished) < call_relay.KEPT_CALLS
