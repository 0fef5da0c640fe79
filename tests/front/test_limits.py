"""Limits of a key: what is let in, when the next may come, and that several workers share one account."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import http.client
import json
import multiprocessing
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tritandem.contracts.errors import ConfigError
from tritandem.front import limits
from tritandem.front.app import App
from tritandem.front.errors import ApiError
from tritandem.front.keys import read_keys
from tritandem.front.limits import Limits, Meter

from tests.client.scripts import chunk, hanging, streaming
from tests.front.asgi import Visit
from tests.front.test_app import CHAT, HELLO, House
from tests.front.test_app import house as house  # a fixture
from tests.front.test_worker import front

KEY = b"k" * 32


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    clock = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(limits, "time", SimpleNamespace(monotonic=lambda: clock.s))
    return clock


@pytest.fixture
def shared() -> Iterator[int]:
    """Memory for forked processes, in which nothing that earlier tests left behind is collected: a channel of grpc.aio
    would wait there for a thread that was not forked."""
    fd = os.memfd_create("limits")
    gc.freeze()
    yield fd
    gc.unfreeze()
    os.close(fd)


def ask(meter: Meter, given: Limits, tokens: int = 0, key: bytes = KEY) -> dict[str, str]:
    headers: dict[str, str] = {}
    with meter.admitted(key, given, headers) as bill:
        bill.tokens = tokens
    return headers


def refusal(meter: Meter, given: Limits, key: bytes = KEY) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(meter, given, key=key)
    assert caught.value.status == 429
    return caught.value


def test_a_minutes_requests_may_come_at_once_and_come_back_evenly(clock: Any) -> None:
    meter, given = Meter(), Limits(requests_per_minute=6)
    left = [ask(meter, given)["x-ratelimit-remaining-requests"] for _ in range(6)]
    assert left == ["5", "4", "3", "2", "1", "0"]
    error = refusal(meter, given)
    assert (error.param, error.headers["retry-after"]) == ("requests_per_minute", "10")
    assert "6 a minute" in str(error)
    clock.s += 10.001
    ask(meter, given)
    refusal(meter, given)
    clock.s += 3600
    assert ask(meter, given)["x-ratelimit-remaining-requests"] == "5", "no more than a minute's is kept"


def test_tokens_are_taken_at_the_end_and_what_is_overdrawn_is_waited_for(clock: Any) -> None:
    meter, given = Meter(), Limits(tokens_per_minute=60)
    assert ask(meter, given, tokens=90)["x-ratelimit-remaining-tokens"] == "60"
    error = refusal(meter, given)
    assert (error.param, error.headers["retry-after"]) == ("tokens_per_minute", "31")
    clock.s += 32
    assert ask(meter, given)["x-ratelimit-limit-tokens"] == "60"


@pytest.mark.parametrize(
    ("given", "used_tokens", "param", "left"),
    [
        (Limits(1, 9, 60), 0, "requests_at_once", ("8", "60")),
        (Limits(2, 1, 60), 20, "requests_per_minute", ("0", "40")),
        (Limits(2, 9, 60), 70, "tokens_per_minute", ("8", "0")),
    ],
)
def test_who_is_refused_is_told_what_is_left(
    clock: Any, given: Limits, used_tokens: int, param: str, left: tuple[str, str]
) -> None:
    meter, headers = Meter(), dict[str, str]()
    with contextlib.ExitStack() as running:
        running.enter_context(meter.admitted(KEY, given, {})).tokens = used_tokens
        if used_tokens:
            running.close()
        with pytest.raises(ApiError) as caught, meter.admitted(KEY, given, headers):
            pass
    assert caught.value.param == param
    assert (headers["x-ratelimit-remaining-requests"], headers["x-ratelimit-remaining-tokens"]) == left
    assert headers["x-ratelimit-limit-tokens"] == "60"


def test_requests_at_once_are_those_that_run(clock: Any) -> None:
    meter, given = Meter(), Limits(requests_at_once=2)
    with meter.admitted(KEY, given, {}), meter.admitted(KEY, given, {}):
        assert refusal(meter, given).param == "requests_at_once"
        ask(meter, given, key=b"another key, other limits, all its own")
    ask(meter, given)
    with pytest.raises(ZeroDivisionError), meter.admitted(KEY, given, {}):
        raise ZeroDivisionError
    with meter.admitted(KEY, given, {}), meter.admitted(KEY, given, {}):
        refusal(meter, given)


def test_a_refused_request_takes_nothing(clock: Any) -> None:
    meter, given = Meter(), Limits(requests_per_minute=6, tokens_per_minute=60, requests_at_once=1)
    ask(meter, given, tokens=90)
    for _ in range(20):
        refusal(meter, given)
    clock.s += 31
    assert ask(meter, given)["x-ratelimit-remaining-requests"] == "5"


def _die_running(fd: int) -> None:
    with Meter(fd, 1).admitted(KEY, Limits(requests_at_once=2), {}):
        os._exit(0)


def test_workers_share_one_account_and_a_replaced_one_runs_nothing(shared: int) -> None:
    one, given = Meter(shared, 0), Limits(requests_at_once=2)
    worker = multiprocessing.get_context("fork").Process(target=_die_running, args=(shared,))
    with one.admitted(KEY, given, {}):
        worker.start()
        worker.join()
        refusal(one, given)
        ask(Meter(shared, 1), given)
        ask(one, given)


def test_a_random_walk_never_lets_in_more_than_is_allowed(clock: Any, shared: int) -> None:
    draw = random.Random(5)
    meters = [Meter(shared, worker) for worker in range(3)]
    given = Limits(requests_at_once=4, requests_per_minute=30)
    running: list[Any] = []
    admitted: list[float] = []
    for _ in range(3000):
        clock.s += draw.random()
        if running and draw.random() < 0.4:
            running.pop(draw.randrange(len(running))).__exit__(None, None, None)
        visit = draw.choice(meters).admitted(KEY, given, {})
        try:
            visit.__enter__()
        except ApiError:
            recent = sum(at > clock.s - 60 for at in admitted)
            assert len(running) == 4 or recent >= 25, "refused though there was room"
            continue
        running.append(visit)
        admitted.append(clock.s)
        assert len(running) <= 4
        assert sum(at > clock.s - 60 for at in admitted) <= 60, "a full account and a minute's refill"
    assert len(admitted) > 200
    for visit in running:
        visit.__exit__(None, None, None)


def test_the_api_says_which_limit_when_to_come_again_and_what_is_left(house: House, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("[sk-a]\nrequests_per_minute = 2\ntokens_per_minute = 8\n[sk-b]\n")
    key = {"authorization": "Bearer sk-a"}

    async def script(app: App) -> list[Any]:
        async def ask() -> Any:
            return await Visit("POST", CHAT, HELLO, key).run(app)

        listed = Visit("GET", "/v1/models", None, key).run(app)
        other = Visit("POST", CHAT, HELLO, {"authorization": "Bearer sk-b"})
        return [await ask(), await ask(), await ask(), await listed, await other.run(app)]

    first, second, third, listed, other = house.run(streaming(), script, keys=read_keys(file))
    assert [one.status for one in (first, second, third, listed, other)] == [200, 200, 429, 200, 200]
    names = [f"x-ratelimit-{what}" for what in ("limit-requests", "remaining-requests", "remaining-tokens")]
    assert [first.headers[name] for name in names] == ["2", "1", "8"]
    assert [second.headers[name] for name in names] == ["2", "0", "0"], "5 tokens asked and 3 answered"
    assert (third.json["error"]["param"], third.headers["retry-after"]) == ("requests_per_minute", "30")
    assert third.json["error"]["code"] == "rate_limit_exceeded"
    assert not set(names) & set(other.headers)


def test_what_a_client_heard_before_it_left_counts(house: House, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("[sk-a]\ntokens_per_minute = 100\n")
    key = {"authorization": "Bearer sk-a"}

    async def script(app: App) -> Any:
        visit = Visit("POST", CHAT, {**HELLO, "stream": True}, key)
        running = asyncio.ensure_future(visit.run(app))
        await visit.arrived.wait()
        visit.leave()
        await running
        return await Visit("POST", "/tokenize", {"prompt": 1}, key).run(app)

    after = house.run(hanging(chunk("a", 7)), script, keys=read_keys(file))
    assert (after.status, after.headers["x-ratelimit-remaining-tokens"]) == (400, "88"), "5 asked, 7 answered"


def test_a_limit_holds_over_all_workers(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("[sk-a]\nrequests_per_minute = 5\n")

    def ask(port: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        headers = {"Authorization": "Bearer sk-a", "Connection": "close"}
        connection.request("POST", CHAT, json.dumps(HELLO), headers)
        return connection.getresponse().status

    with front(streaming(), tmp_path / "log", workers=2, keys=file) as (_, port, _):
        assert sorted(ask(port) for _ in range(12)) == [200] * 5 + [429] * 7


def _hammer(fd: int, worker: int, tries: int, port: Any) -> None:
    meter, given, let_in = Meter(fd, worker), Limits(requests_per_minute=500, requests_at_once=4), 0
    for _ in range(tries):
        try:
            ask(meter, given, tokens=1)
            let_in += 1
        except ApiError:
            pass
    port.send(let_in)


def test_processes_that_hammer_one_key_get_what_one_would(shared: int) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    begun_s = time.monotonic()
    workers = [context.Process(target=_hammer, args=(shared, n, 300, theirs)) for n in range(4)]
    for worker in workers:
        worker.start()
    let_in = [ours.recv() for _ in workers]
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    came_back = (time.monotonic() - begun_s) * 500 / 60
    assert 500 <= sum(let_in) <= 500 + came_back + 1, let_in
    with Meter(shared, 9).admitted(KEY, Limits(requests_at_once=1), {}):
        pass  # nothing runs any more


@pytest.mark.parametrize("wrong", ["requests_per_minute = 0", "tokens_per_minute = 1.5", "requests_at_once = true"])
def test_a_limit_that_is_none_is_refused(wrong: str, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(f"[sk-one]\n{wrong}\n")
    with pytest.raises(ConfigError, match=wrong.partition(" ")[0]):
        read_keys(file)
