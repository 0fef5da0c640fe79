"""The service: any thread may call it, slow receivers get larger messages, and no failure outlives its requests."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tritandem.contracts.errors import EngineFailed, InvalidRequest
from tritandem.contracts.stream import FinishCode, TokenBatch
from tritandem.engine import service as service_module
from tritandem.engine.service import EngineService
from tritandem.engine.step import Runner, StepPlan, StepResult
from tritandem.telemetry.heartbeat import Busy

from tests.engine.engine_rig import VOCAB, Rig, make_runner, prompts, request
from tests.fakes.arithmetic_runner import ArithmeticRunner

WAIT_S = 20.0


class GatedRunner:
    """`Runner` whose launches wait for permission; may be told to break in a way that no runner should."""

    def __init__(self, inner: Runner) -> None:
        self._inner, self.spec = inner, inner.spec
        self.gate = threading.Semaphore(0)
        self.defect: Exception | None = None
        self.closed = False

    def launch(self, plan: StepPlan) -> None:
        assert self.gate.acquire(timeout=WAIT_S), "no permission to launch"
        self._inner.launch(plan)

    def collect(self, wait: bool) -> StepResult | None:
        return self._inner.collect(wait)

    def pending(self) -> int:
        if self.defect is not None:
            defect, self.defect = self.defect, None
            raise defect
        return self._inner.pending()

    def busy(self) -> bool:
        return self._inner.busy()

    def prepare(self) -> bool:
        return self._inner.prepare()

    def close(self) -> None:
        self.closed = True
        self._inner.close()


class PacedRunner:
    """`Runner` on a device whose steps take `step_s` each, one after the other; launches return at once."""

    def __init__(self, inner: Runner, step_s: float) -> None:
        self._inner, self._step_ns = inner, int(step_s * 1e9)
        self.spec = dataclasses.replace(inner.spec, launch_ahead_steps=3)
        self._in_flight: deque[StepResult] = deque()
        self._ends_ns = 0
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> None:
        launched_ns = time.monotonic_ns()
        self._inner.launch(plan)
        result = self._inner.collect(wait=True)
        assert result is not None
        self._ends_ns = max(launched_ns, self._ends_ns) + self._step_ns
        self._in_flight.append(dataclasses.replace(result, launched_ns=launched_ns, finished_ns=self._ends_ns))
        self.plans.append(plan)

    def collect(self, wait: bool) -> StepResult | None:
        if not self._in_flight:
            return None
        left_ns = self._in_flight[0].finished_ns - time.monotonic_ns()
        if left_ns > 0:
            if not wait:
                return None
            time.sleep(left_ns / 1e9)
        return self._in_flight.popleft()

    def pending(self) -> int:
        return len(self._in_flight)

    def busy(self) -> bool:
        return time.monotonic_ns() < self._ends_ns

    def prepare(self) -> bool:
        return self._inner.prepare()

    def close(self) -> None:
        self._inner.close()


@pytest.fixture
def start() -> Iterator[Callable[[Runner], EngineService]]:
    services: list[EngineService] = []

    def starter(runner: Runner) -> EngineService:
        services.append(EngineService(runner))
        return services[-1]

    yield starter
    for service in services:
        service.close()


def read_all(service: EngineService) -> dict[int, tuple[list[int], FinishCode]]:
    answers: dict[int, tuple[list[int], FinishCode]] = {}
    while service.live():
        batch = service.next_batch(WAIT_S)
        assert batch is not None, "nothing came"
        for seq_id, tokens, finish in rows_of(batch):
            known = answers.get(seq_id, ([], FinishCode.RUNNING))[0]
            answers[seq_id] = (known + tokens, finish)
    return answers


def rows_of(batch: TokenBatch) -> list[tuple[int, list[int], FinishCode]]:
    parts = np.split(batch.tokens, np.cumsum(batch.token_counts)[:-1])
    return [
        (int(seq_id), part.tolist(), FinishCode(code))
        for seq_id, part, code in zip(batch.seq_ids, parts, batch.finish, strict=True)
    ]


def test_a_step_that_does_not_come_back_is_seen_from_outside() -> None:
    in_step, runner = Busy("a step", 1.0), GatedRunner(make_runner())
    service = EngineService(runner, in_step=in_step)
    assert in_step.oldest_ns() is None
    service.submit([request(1, prompts(1, seed=1)[0])])
    deadline_s = time.monotonic() + WAIT_S
    while (since_ns := in_step.oldest_ns()) is None:
        assert time.monotonic() < deadline_s
    assert runner.pending() == 0  # it waits for permission, inside the launch
    assert in_step.oldest_ns() == since_ns
    runner.gate.release(10_000)
    read_all(service)
    service.close()
    assert in_step.oldest_ns() is None


def test_many_threads_submit_and_everyone_gets_the_right_tokens(start: Callable[[Runner], EngineService]) -> None:
    batch = [request(i, ids) for i, ids in enumerate(prompts(12, seed=1))]
    expected = Rig(make_runner()).run(batch)
    service = start(make_runner())
    threads = [threading.Thread(target=service.submit, args=(batch[i::3],)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    answers = read_all(service)
    assert {i: tokens for i, (tokens, _) in answers.items()} == {i: answer.tokens for i, answer in expected.items()}


def test_a_receiver_that_is_behind_gets_everything_in_one_message(start: Callable[[Runner], EngineService]) -> None:
    runner = GatedRunner(make_runner())
    service = start(runner)
    assert service.submit([request(0, range(9), max_tokens=6), request(1, range(5), max_tokens=6)]) == [None, None]
    assert service.next_batch(0.01) is None
    assert service.live() == 2
    runner.gate.release(6)
    while service.load().output_tokens < 12:
        assert service.load().waiting >= 0
        threading.Event().wait(0.001)
    batch = service.next_batch(WAIT_S)
    assert batch is not None
    assert batch.token_counts.tolist() == [6, 6]
    assert batch.finish.tolist() == [FinishCode.LENGTH, FinishCode.LENGTH]
    assert (batch.stamps_ns > 0).all()
    assert (np.diff(batch.stamps_ns, axis=1) >= 0).all()
    assert service.live() == 0
    assert batch.load.free_blocks == batch.load.total_blocks


def test_long_steps_are_launched_just_in_time_so_that_a_newcomer_is_in_the_next(
    start: Callable[[Runner], EngineService],
) -> None:
    step_s = 0.2
    runner = PacedRunner(make_runner(num_blocks=64), step_s)
    service = start(runner)
    service.submit([request(0, np.arange(5, dtype=np.int32), max_tokens=40)])
    joined_next = False
    for newcomer in range(1, 6):  # a loaded machine may be late now and then
        steps = len(runner.plans)
        while len(runner.plans) < steps + 3:  # the third is launched; its predecessor ends soon
            time.sleep(step_s / 100)
        time.sleep(step_s / 4)
        launched, in_flight = len(runner.plans), runner.pending()
        service.submit([request(newcomer, np.arange(newcomer, newcomer + 4, dtype=np.int32), max_tokens=1)])
        while not any(chunk for plan in runner.plans[launched:] for chunk in plan.prefill):
            time.sleep(step_s / 100)
        joined_next |= in_flight == 1 and bool(runner.plans[launched].prefill)
        if joined_next:
            break
    assert joined_next, "every newcomer found a step launched behind the running one"


def test_each_sequence_of_a_submit_is_answered_for_itself(start: Callable[[Runner], EngineService]) -> None:
    service = start(make_runner())
    answers = service.submit([request(0, [1]), request(1, [VOCAB]), request(0, [2]), request(2, [])])
    assert answers[0] is None
    assert [type(answer) for answer in answers[1:]] == [InvalidRequest] * 3
    assert set(read_all(service)) == {0}
    assert service.submit([request(0, [1])]) == [None], "the id of an ended sequence may be used again"
    read_all(service)


def test_cancelling_ends_a_running_and_a_waiting_sequence(start: Callable[[Runner], EngineService]) -> None:
    runner = GatedRunner(make_runner(max_sequences=1))
    service = start(runner)
    service.submit([request(0, range(9), max_tokens=200), request(1, range(5))])
    runner.gate.release(2)
    service.cancel([0, 1, 77])
    runner.gate.release(300)
    answers = read_all(service)
    assert answers[0][1] == answers[1][1] == FinishCode.CANCELLED
    assert len(answers[0][0]) < 200
    assert answers[1][0] == []


def test_a_defect_in_a_step_fails_what_was_live_and_nothing_after_it(start: Callable[[Runner], EngineService]) -> None:
    runner = GatedRunner(make_runner())
    service = start(runner)
    runner.defect = ZeroDivisionError("a defect")
    service.submit([request(0, range(9))])
    batch = service.next_batch(WAIT_S)
    assert batch is not None
    assert batch.finish.tolist() == [FinishCode.ERROR]
    assert "a defect" in batch.errors[0]
    runner.gate.release(100)
    service.submit([request(1, range(9))])
    assert read_all(service)[1][1] == FinishCode.LENGTH


def test_closing_cancels_what_lives_and_refuses_what_comes(start: Callable[[Runner], EngineService]) -> None:
    runner = GatedRunner(make_runner())
    service = start(runner)
    service.submit([request(0, range(9), max_tokens=200)])
    runner.gate.release(3)
    closer = threading.Thread(target=service.close)
    closer.start()
    runner.gate.release(300)
    closer.join(WAIT_S)
    assert not closer.is_alive()
    assert runner.closed
    batch = service.next_batch(WAIT_S)
    assert batch is not None
    assert batch.finish.tolist() == [FinishCode.CANCELLED]
    assert isinstance(service.submit([request(1, [1])])[0], EngineFailed)


def test_the_answer_of_one_sequence_carries_its_cached_tokens_and_logprobs(
    start: Callable[[Runner], EngineService],
) -> None:
    service = start(make_runner())
    service.submit([request(0, range(20))])
    read_all(service)
    service.submit([request(1, range(20), logprobs=2, max_tokens=1), request(2, [3], max_tokens=1)])
    seen = {}
    while service.live():
        batch = service.next_batch(WAIT_S)
        assert batch is not None
        for row, seq_id in enumerate(batch.seq_ids.tolist()):
            seen[seq_id] = (int(batch.cached_tokens[row]), batch, int(batch.token_counts[:row].sum()))
    cached, batch, token = seen[1]
    assert cached == 16
    assert batch.logprobs is not None
    assert batch.top_ids is not None
    assert batch.top_ids[token][0] == batch.tokens[token]
    cached, batch, token = seen[2]
    assert cached == 0
    assert batch.logprobs is None or np.isnan(batch.logprobs[token])


class PreparingRunner(ArithmeticRunner):
    """Has something to prepare, `left` times, and knows what is efficient afterwards; may fail at it."""

    def __init__(self, left: int, defect: Exception | None = None) -> None:
        super().__init__(num_slots=4, num_blocks=40)
        self.left, self.defect, self.done = left, defect, threading.Event()
        self.asked = 0

    def prepare(self) -> bool:
        assert not self.pending()
        self.asked += 1
        if self.defect is not None:
            self.done.set()
            raise self.defect
        if not self.left:
            self.done.set()
            return False
        self.left -= 1
        self.spec = dataclasses.replace(self.spec, efficient_prefill_tokens=((4, 7),), pass_tokens=(7, 9))
        return True


def test_quiet_moments_are_used_and_steps_are_planned_by_what_was_found(
    start: Callable[[Runner], EngineService], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "QUIET_S", 0.05)
    runner = PreparingRunner(left=5)
    service = start(runner)
    service.submit([request(1, range(9), max_tokens=20)])
    assert not runner.done.wait(0.2)  # somebody still reads
    asked = runner.asked
    read_all(service)
    assert runner.done.wait(WAIT_S)
    assert (runner.left, runner.asked - asked) == (0, 6 - asked)
    assert service._core.budget.efficient_tokens == ((4, 7),)
    assert service._core.budget.pass_tokens == (7, 9)
    service.submit([request(9, range(9), max_tokens=5)])
    assert read_all(service)[9][1] == FinishCode.LENGTH
    assert runner.asked == 6  # there is nothing left


def test_what_cannot_be_prepared_costs_no_request(
    start: Callable[[Runner], EngineService], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_module, "FIRST_QUIET_S", 0.01)
    runner = PreparingRunner(left=5, defect=RuntimeError("no memory"))
    service = start(runner)
    assert runner.done.wait(WAIT_S)
    service.submit([request(1, range(9), max_tokens=5)])
    assert read_all(service)[1][1] == FinishCode.LENGTH
    assert runner.asked == 1
