"""Two engines under one scheduler: both work, one that is killed is left out, the other goes on, nothing hangs.

The engines only count, so that streams are opened, left and read at a rate that no model reaches.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tritandem.machine.device import DeviceGroup
from tritandem.server import TritonServer
from tritandem.server.health import stub_models
from tritandem.server.repository import default_repository
from tritandem_client import AsyncClient, Client, Failed, TritandemClientError

from tests.real_triton.started import start_server
from tests.soak.memory import stub_pids

pytestmark = pytest.mark.triton

STEP_S = 0.005
CLIENTS = 12
SHORT, LONG = 12, 400
STREAMS, NUMBERED = 256, 150
ENDS_WITHIN_S = 60.0
ENGINE = f"""
        from tritandem_bench.stand_ins import NumberedService
        from tritandem.triton_io.plugs.engine import EnginePlug
        from tritandem.triton_io.hops.inner_key import load_inner_key

        self._plug = EnginePlug(NumberedService({STEP_S}), 1.0, load_inner_key())
"""
SCHEDULER = """
        from tritandem.triton_io.hops import bls_engine
        from tritandem.triton_io.plugs.process import Process
        from tritandem.triton_io.plugs.scheduler_start import start

        bls_engine.ROTATE_AFTER_RESPONSES = 2
        self._plug = start(Process(args))
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("several") / "model_repository"
    shutil.copytree(default_repository(), repository, ignore=shutil.ignore_patterns("__pycache__"))
    for model, body in {"engine": ENGINE, "scheduler": SCHEDULER}.items():
        (repository / model / "1" / "model.py").write_text(
            f"class TritonPythonModel:\n    def initialize(self, args):{body}\n"
            "    def execute(self, requests):\n        self._plug.execute(requests)\n\n"
            "    def finalize(self):\n        self._plug.close()\n"
        )
    return repository


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[TritonServer]:
    with start_server(repository=repository, devices=(DeviceGroup.parse("cpu"), DeviceGroup.parse("cpu"))) as running:
        yield running


class Load:
    """CLIENTS threads that each send `requests` requests, or, without a number, one after the other until `stop`;
    `counts` are tokens of whole answers."""

    def __init__(self, server: TritonServer, max_tokens: int, requests: int | None = None) -> None:
        self.counts: list[int] = []
        self.errors: list[TritandemClientError] = []
        self.streaming = threading.Semaphore(0)
        self.stop = threading.Event()
        self._server, self._requests, self._max_tokens = server, requests, max_tokens
        self._threads = [threading.Thread(target=self._run) for _ in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        with Client(self._server.grpc_url, timeout_s=60) as client:
            for turn in itertools.count():
                if turn == self._requests or self.stop.is_set():
                    break
                count = 0
                try:
                    for chunk in client.stream(
                        "Say it.", max_tokens=self._max_tokens, sampling_parameters={"ignore_eos": True}
                    ):
                        if count == 0:
                            self.streaming.release()
                        count += chunk.num_output_tokens
                except TritandemClientError as error:
                    self.errors.append(error)
                else:
                    self.counts.append(count)

    def wait_all_stream(self) -> None:
        for _ in range(CLIENTS):
            assert self.streaming.acquire(timeout=30)

    def join(self) -> None:
        end_s = time.monotonic() + ENDS_WITHIN_S
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        assert not any(thread.is_alive() for thread in self._threads), "requests hang"


def served_by(server: TritonServer) -> Counter[str]:
    """Finished requests by engine, from the log."""
    lines = re.findall(r'\{\\?"event.*?\}"?$', server.log(), re.MULTILINE)
    return Counter(json.loads(line.rstrip('"').replace('\\"', '"'))["engine"] for line in lines)


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def test_both_engines_serve_and_every_stream_is_whole(server: TritonServer) -> None:
    stubs = stub_models(server.pid)
    load = Load(server, SHORT, 15)
    load.join()
    assert not load.errors
    assert load.counts == [SHORT] * CLIENTS * 15
    wait_for("both engines in the log", lambda: set(served_by(server)) == {"engine", "engine_2"}, 60.0)
    assert stub_models(server.pid) == stubs


def test_256_streams_are_whole_and_in_order_though_readers_are_slow(server: TritonServer) -> None:
    """Every answer is the same numbered text, so that a lost, doubled or displaced piece shows."""
    options = {"max_tokens": NUMBERED, "sampling_parameters": {"ignore_eos": True}}
    rng = random.Random(0)

    async def read(client: AsyncClient, pause_s: float) -> tuple[str, int]:
        texts, tokens = [], 0
        async for chunk in client.stream("Count.", **options):  # type: ignore[arg-type]
            texts.append(chunk.text)
            tokens += chunk.num_output_tokens
            if pause_s:
                await asyncio.sleep(pause_s * rng.random())
        return "".join(texts), tokens

    async def read_all() -> tuple[str, list[tuple[str, int]]]:
        async with AsyncClient(server.grpc_url, timeout_s=120) as client:
            alone = await client.generate("Count.", **options)  # type: ignore[arg-type]
            pauses = [rng.choice((0.0, 0.05, 0.5)) for _ in range(STREAMS)]
            return alone.text, await asyncio.gather(*(read(client, pause_s) for pause_s in pauses))

    expected, answers = asyncio.run(read_all())
    assert len(expected) > NUMBERED
    assert set(answers) == {(expected, NUMBERED)}


def test_a_killed_engine_fails_its_streams_alone(server: TritonServer) -> None:
    load = Load(server, LONG)
    load.wait_all_stream()
    os.kill(stub_pids(server.pid)["engine_2"], signal.SIGKILL)
    fresh = Load(server, SHORT, 10)  # some are on their way to it, and move
    fresh.join()
    load.stop.set()
    load.join()
    assert load.counts
    assert load.counts == [LONG] * len(load.counts)
    assert load.errors
    assert all(isinstance(error, Failed) and "engine_2" in str(error) for error in [*load.errors, *fresh.errors])
    last = Load(server, SHORT, 5)
    last.join()
    assert last.counts == [SHORT] * CLIENTS * 5
