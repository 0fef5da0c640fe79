"""Requests that end before their answer: stopped by id, cancelled, abandoned."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tritandem.server import TritonServer

from tests.real_triton.raw_client import RawClient, number, text
from tests.soak.memory import memory_of

pytestmark = pytest.mark.triton

# Far longer than ENDS_WITHIN_S on any CPU, and the KV blocks of its engine hold five of them.
ENDLESS = {
    "text_input": text("1, 2, 3, 4,"),
    "max_tokens": number(4000, np.int32),
    "sampling_parameters": text('{"ignore_eos": true}'),
    "stream": number(True, np.bool_),
}
ENDS_WITHIN_S = 20.0
ROOT = Path(__file__).resolve().parents[2]
KILLED_CLIENTS = int(os.environ.get("TRITANDEM_TEST_KILLED_CLIENTS", "20"))


def wait_until(what: str, condition: Callable[[], bool]) -> float:
    """Seconds it took. Polls a real server: there is no event to wait on from outside."""
    begun = time.monotonic()
    while not condition():
        if time.monotonic() - begun > ENDS_WITHIN_S:
            raise AssertionError(f"not within {ENDS_WITHIN_S} s: {what}")
        time.sleep(0.02)
    return time.monotonic() - begun


def idle(client: RawClient) -> bool:
    load = client.engine_load()
    return load.running == load.waiting == 0


@pytest.mark.parametrize("model", ["ensemble", "scheduler"])
def test_stop_by_id_ends_a_stream_with_the_text_so_far(client: RawClient, model: str) -> None:
    stream = client.stream(model, ENDLESS, request_id="count")
    responses = iter(stream)
    next(responses)
    [stopped] = client.results(model, {"stop": number(True, np.bool_)}, request_id="count")
    assert stopped.as_numpy("outcome")[0] == b"STOPPED"
    *_, last = responses
    stream.close()
    assert last.as_numpy("finish_reason")[0] == b"cancelled"
    assert last.as_numpy("outcome")[0] == b"STOPPED"
    wait_until("the engine is idle", lambda: idle(client))


def test_stopping_an_id_that_nobody_has_is_answered(client: RawClient) -> None:
    assert client.answer("scheduler", {"stop": number(True, np.bool_)}, request_id="nobody") == ""


def test_closing_a_stream_frees_the_engine(client: RawClient) -> None:
    stream = client.stream("scheduler", ENDLESS)
    next(iter(stream))
    stream.close(cancel=True)
    wait_until("the engine is idle", lambda: idle(client))


def test_a_deadline_ends_a_stream_on_both_paths(client: RawClient) -> None:
    for model in ("ensemble", "scheduler"):
        message = client.error(model, ENDLESS | {"deadline_ms": number(400, np.int64)})
        assert message.find("EXPIRED") >= 0
    wait_until("the engine is idle", lambda: idle(client))


VICTIM = """
import sys
from tests.real_triton.raw_client import RawStream
from tests.real_triton.test_ending_early import ENDLESS
stream = RawStream(sys.argv[1], "scheduler", ENDLESS)
next(iter(stream))
print("streaming", flush=True)
for _ in stream:
    pass
"""


MAX_GROWTH_MB = 24  # of one process; a lost request would keep its tensors, threads and queues


def kill_in_mid_stream(client: RawClient, count: int) -> None:
    """By SIGKILL, as a crashed host's clients end."""
    victims = [
        subprocess.Popen([sys.executable, "-c", VICTIM, client.url], stdout=subprocess.PIPE, cwd=ROOT)
        for _ in range(count)
    ]
    for victim in victims:
        assert victim.stdout is not None
        assert victim.stdout.readline() == b"streaming\n"
    for victim in victims:
        victim.kill()
        victim.wait()
        assert victim.stdout is not None
        victim.stdout.close()


def test_killed_clients_leave_nothing_behind(server: TritonServer, client: RawClient) -> None:
    wait_until("the engine is idle", lambda: idle(client))
    blocks = client.engine_load().free_blocks
    kill_in_mid_stream(client, 5)  # pools and arenas have their size afterwards
    wait_until("no sequence is left", lambda: idle(client))
    before = memory_of(server.pid, server.shm_prefix)
    slowest_s = 0.0
    for left in range(KILLED_CLIENTS, 0, -5):
        kill_in_mid_stream(client, min(left, 5))
        slowest_s = max(slowest_s, wait_until("no sequence is left", lambda: idle(client)))
    assert client.engine_load().free_blocks == blocks
    after = memory_of(server.pid, server.shm_prefix)
    growth = {name: round(now - before.private[name], 1) for name, now in after.private.items()}
    print(
        f"{KILLED_CLIENTS} killed; slowest end {slowest_s:.2f} s; private growth {growth} MB;",
        f"shared {before.shared:.1f} -> {after.shared:.1f} MB",
    )
    assert max(growth.values()) < MAX_GROWTH_MB, growth
    assert after.shared - before.shared < MAX_GROWTH_MB
    assert client.answer("scheduler", {"text_input": text("Hello"), "max_tokens": number(2, np.int32)})
