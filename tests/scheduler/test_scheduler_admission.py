"""Claims about who may wait."""

from __future__ import annotations

import pytest
from tritandem.contracts.errors import DeadlineExpired, Draining, InvalidRequest, Saturated, TritandemError
from tritandem.contracts.requests import GenerationRequest, PriorityClass
from tritandem.contracts.stream import LoadSnapshot
from tritandem.scheduler.admission import (
    AdmissionLimits,
    Backlog,
    QueueState,
    decide,
    expected_tokens,
    never_fits,
    total_load,
)

from tests.fakes.scheduling import request

LIMITS = AdmissionLimits(max_requests=4, max_tokens=1000)
LOAD = LoadSnapshot(
    total_blocks=64,
    free_blocks=64,
    block_tokens=16,
    max_sequences=8,
    max_context_tokens=512,
    decode_step_ns=10_000_000,
    prefill_token_ns=100_000,
)


def refusal(
    demand: GenerationRequest,
    queue: QueueState,
    own: QueueState | None = None,
    limits: AdmissionLimits = LIMITS,
    now_ns: int = 0,
) -> TritandemError | None:
    """Of a tenant that has `own` of what waits, by default nothing."""
    return decide(demand, Backlog(queue, own or QueueState(), LOAD), limits, now_ns)


def test_a_request_that_fits_may_wait() -> None:
    assert refusal(request(), QueueState()) is None


def test_the_queue_is_bounded_by_requests() -> None:
    assert refusal(request(), QueueState(3, 3, 3)) is None
    assert type(refusal(request(), QueueState(4, 4, 4))) is Saturated


def test_the_queue_is_bounded_by_tokens() -> None:
    demand = request(prompt_tokens=10, max_tokens=90)
    assert refusal(demand, QueueState(1, 300, 600)) is None
    assert type(refusal(demand, QueueState(1, 300, 601))) is Saturated


def test_a_tenant_that_has_filled_its_share_is_refused_by_name_while_others_find_room() -> None:
    limits, demand = AdmissionLimits(max_requests=16, max_tokens=1600), request(prompt_tokens=1, max_tokens=1)
    full = QueueState(14, 14, 14)
    refused = refusal(demand, full, own=QueueState(12, 12, 12), limits=limits)
    assert str(refused).startswith("12 of this tenant's and 2 other requests are waiting; retry after")
    assert refusal(demand, full, limits=limits) is None
    many_tokens = QueueState(2, 700, 699)
    refused = refusal(demand, many_tokens, own=many_tokens, limits=limits)
    assert str(refused).startswith("requests for 1399 tokens are waiting")
    assert refusal(demand, many_tokens, limits=limits) is None


def test_a_backlog_of_batch_requests_leaves_room_in_the_queue_for_the_others() -> None:
    limits = AdmissionLimits(max_requests=16, max_tokens=1600)
    batch, normal = (request(max_tokens=97, priority=one) for one in (PriorityClass.BATCH, PriorityClass.NORMAL))
    by_requests, by_tokens = QueueState(14, 14, 14), QueueState(2, 650, 651)
    assert refusal(batch, QueueState(13, 650, 650), limits=limits) is None
    assert [type(refusal(batch, full, limits=limits)) for full in (by_requests, by_tokens)] == [Saturated] * 2
    assert [refusal(normal, full, limits=limits) for full in (by_requests, by_tokens)] == [None] * 2


def test_one_large_request_may_wait_in_an_empty_queue() -> None:
    small = AdmissionLimits(max_requests=4, max_tokens=10)
    assert refusal(request(max_tokens=100), QueueState(), limits=small) is None


def test_draining_refuses_everybody() -> None:
    assert type(refusal(request(), QueueState(), limits=AdmissionLimits(4, 1000, accepting=False))) is Draining


def test_a_deadline_that_has_passed_is_no_work() -> None:
    late = request(deadline_ns=5)
    assert refusal(late, QueueState(), now_ns=4) is None
    assert type(refusal(late, QueueState(), now_ns=5)) is DeadlineExpired


@pytest.mark.parametrize(
    ("prompt", "output", "field"), [(512, 1, "text_input"), (500, 13, "max_tokens"), (500, 12, None)]
)
def test_what_can_never_fit_is_invalid_and_names_the_field(prompt: int, output: int, field: str | None) -> None:
    refusal = never_fits(prompt, output, LOAD)
    assert (refusal.field_name if refusal else None) == field


def test_kv_blocks_bound_a_request_where_they_are_fewer_than_the_context() -> None:
    few_blocks = LoadSnapshot(total_blocks=4, block_tokens=16, max_context_tokens=512)
    assert never_fits(60, 4, few_blocks) is None
    assert isinstance(never_fits(60, 5, few_blocks), InvalidRequest)


def test_unknown_limits_refuse_nothing() -> None:
    assert never_fits(10**6, 10**6, LoadSnapshot()) is None


def test_the_retry_hint_is_the_time_of_the_work_ahead() -> None:
    queue = QueueState(requests=10, prompt_tokens=20_000, output_tokens=800)
    assert Backlog(queue, QueueState(), LOAD).retry_after_s() == pytest.approx(20_000 * 1e-4 + 800 / 8 * 0.01)
    assert Backlog(queue, QueueState(), LOAD, 0.5).retry_after_s() == pytest.approx(20_000 * 1e-4 + 400 / 8 * 0.01)
    measured = Backlog(queue, QueueState(), LOAD, tokens_per_s=5200.0)
    assert measured.retry_after_s() == pytest.approx(20_800 / 5200)
    assert Backlog(queue, QueueState(), LoadSnapshot()).retry_after_s() == 1.0


def test_expected_tokens_follow_measured_use_and_never_exceed_the_budget() -> None:
    assert expected_tokens(10, 100, 1.0) == 110
    assert expected_tokens(10, 1000, 0.1) == 10 + 125 + 16
    assert expected_tokens(10, 5, 0.0) == 15


def test_engines_side_by_side_add_up() -> None:
    both = total_load([LOAD, LOAD])
    assert both.max_sequences == 16
    assert both.free_blocks == 128
    assert both.total_blocks == 64, "one sequence lives on one engine"
    assert both.prefill_token_ns == 50_000
    assert total_load([]) == LoadSnapshot()
