"""The scheduler's calls to the engine under load: frequent changes of the stream call, a full log queue, SIGTERM.

The engine is one that only counts; a stream call is left after a few responses instead of after many. The models find
their key as they do where Triton runs without `tritandem serve`.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tritandem.config import INNER_KEY_ENV
from tritandem.server import TritonServer
from tritandem.server.health import stub_models
from tritandem.server.repository import default_repository
from tritandem_client import Client

from tests.real_triton.started import start_server

pytestmark = pytest.mark.triton

STEP_S = 0.005
CLIENTS, REQUESTS, SHORT, LONG = 16, 12, 12, 800
INITIALIZE = {
    "engine": f"""
        from tritandem_bench.stand_ins import FreeRunningService
        from tritandem.triton_io.plugs.engine import EnginePlug
        from tritandem.triton_io.hops.inner_key import load_inner_key

        self._plug = EnginePlug(FreeRunningService({STEP_S}), 1.0, load_inner_key())
""",
    # Lines of the log wait in the same queue as the clean-up of calls that have ended.
    "scheduler": """
        from tritandem.triton_io.hops import bls_engine
        from tritandem.triton_io.plugs.process import Process
        from tritandem.triton_io.plugs.scheduler_start import start

        import threading

        import triton_python_backend_utils as pb_utils

        bls_engine.ROTATE_AFTER_RESPONSES = 2
        self._plug = start(Process(args))
        opened, logs = bls_engine.BlsEngine._open_stream, threading.Lock()

        def open_and_log(engine):
            with logs:
                for _ in range(100):
                    pb_utils.Logger.log_info("a stream call is opened " + 400 * ".")
            return opened(engine)

        bls_engine.BlsEngine._open_stream = open_and_log
""",
}


@pytest.fixture
def counting_server(tmp_path: Path) -> Iterator[TritonServer]:
    repository = tmp_path / "model_repository"
    shutil.copytree(default_repository(), repository, ignore=shutil.ignore_patterns("__pycache__"))
    for model, body in INITIALIZE.items():
        (repository / model / "1" / "model.py").write_text(
            f"class TritonPythonModel:\n    def initialize(self, args):{body}\n"
            "    def execute(self, requests):\n        self._plug.execute(requests)\n\n"
            "    def finalize(self):\n        self._plug.close()\n"
        )
    for file in repository.glob("*/1/model.py"):
        head = "def initialize(self, args):\n"
        without_key = f"{head}        import os\n\n        del os.environ[{INNER_KEY_ENV!r}]\n"
        file.write_text(file.read_text().replace(head, without_key))
    with start_server(repository=repository) as server:
        yield server


def in_parallel(server: TritonServer, max_tokens: int, requests: int, streaming: threading.Semaphore) -> list[int]:
    """Each of CLIENTS clients sends so many requests; the tokens of every answer, in no order."""
    counts: list[int] = []

    def run() -> None:
        with Client(server.grpc_url, model="scheduler", timeout_s=60) as client:
            for _ in range(requests):
                count = 0
                for chunk in client.stream("Say it.", max_tokens=max_tokens, sampling_parameters={"ignore_eos": True}):
                    if count == 0:
                        streaming.release()
                    count += chunk.num_output_tokens
                counts.append(count)

    threads = [threading.Thread(target=run) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def test_no_process_dies_and_no_token_is_lost_when_stream_calls_change(counting_server: TritonServer) -> None:
    stubs = stub_models(counting_server.pid)
    streaming = threading.Semaphore(0)
    assert in_parallel(counting_server, SHORT, REQUESTS, streaming) == [SHORT] * CLIENTS * REQUESTS
    assert stub_models(counting_server.pid) == stubs

    streaming = threading.Semaphore(0)
    answers: list[int] = []
    load = threading.Thread(target=lambda: answers.extend(in_parallel(counting_server, LONG, 1, streaming)))
    load.start()
    for _ in range(CLIENTS):
        assert streaming.acquire(timeout=30)
    counting_server.drain()  # new calls are refused from here on, the open one has to do
    load.join()
    assert answers == [LONG] * CLIENTS
    assert counting_server.stop() == 0
