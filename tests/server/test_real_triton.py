"""The real binary over a repository of three small models: what the fake only pretends."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from tritandem.server import TritonServer, supervisor
from tritandem.server.backoff import RestartPolicy
from tritandem.server.health import stub_models
from tritandem.server.supervisor import Supervisor

from tests.fakes.ports import free_ports

pytestmark = pytest.mark.triton

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
instance_group [ { count: 1 kind: KIND_CPU } ]
"""
# Answers with what a stub can tell about its own process.
WHO = """
import sys
import numpy as np
import triton_python_backend_utils as pb_utils
import tritandem

class TritonPythonModel:
    def execute(self, requests):
        texts = [pb_utils.get_input_tensor_by_name(r, "TEXT").as_numpy()[0].decode() for r in requests]
        answers = [f"{text} {sys.prefix} {sys.version_info[1]} {tritandem.__file__}" for text in texts]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", np.array([answer.encode()], dtype=object))])
            for answer in answers
        ]
"""
# Streams as many numbers as the text says; the second when a file is there.
COUNT = """
import threading
from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            count, gate = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0].decode().split()
            threading.Thread(target=self.run, args=(request.get_response_sender(), int(count), Path(gate))).start()

    def run(self, sender, count, gate):
        pause = threading.Event()
        for number in range(count):
            while number and not gate.exists():
                pause.wait(0.1)
            tensor = pb_utils.Tensor("TEXT", np.array([str(number).encode()], dtype=object))
            sender.send(pb_utils.InferenceResponse([tensor]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
# Hangs as the text says, and answers any other.
HANG = """
import re
import threading
import triton_python_backend_utils as pb_utils
from tritandem.config import heartbeat_from_environment
from tritandem.telemetry.heartbeat import Heartbeat

class TritonPythonModel:
    def initialize(self, args):
        self.in_call = Heartbeat(heartbeat_from_environment()).busy("a call", 1.0)

    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "TEXT")) for request in requests]

    def answer(self, text):
        with self.in_call:
            if text.as_numpy()[0] == b"a lock that nobody lets go of":
                threading.Event().wait()
            if text.as_numpy()[0] == b"an interpreter that nobody lets go of":
                re.match("(a+)+b", "a" * 60)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", text.as_numpy())])
"""
# Hangs in its first start.
HANG_AT_START = """
import threading
from pathlib import Path
from tritandem.config import heartbeat_from_environment
from tritandem.telemetry.heartbeat import Heartbeat

class TritonPythonModel:
    def initialize(self, args):
        begun = Path("BEGUN")
        with Heartbeat(heartbeat_from_environment()).busy("loading", 1.0):
            if not begun.exists():
                begun.touch()
                threading.Event().wait()

    def execute(self, requests):
        return []
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    decoupled = "model_transaction_policy { decoupled: true }\n"
    for name, config, code in (("who", CONFIG, WHO), ("count", CONFIG + decoupled, COUNT), ("hang", CONFIG, HANG)):
        version = root / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config)
        (version / "model.py").write_text(code)
    return root


def make(repository: Path, **options: object) -> TritonServer:
    http, grpc, metrics = free_ports(3)
    return TritonServer(repository=repository, http_port=http, grpc_port=grpc, metrics_port=metrics, **options)


@pytest.fixture
def server(repository: Path) -> Iterator[TritonServer]:
    with make(repository) as running:
        yield running


class Caller:
    """A client with one stream; `texts` fills as answers come, `wait_for(n)` waits for n of them."""

    def __init__(self, url: str) -> None:
        import tritonclient.grpc as grpc

        self.grpc, self.client = grpc, grpc.InferenceServerClient(url)
        self.texts: list[str] = []
        self.errors: list[Exception] = []
        self._news = threading.Condition()

    def _input(self, text: str) -> list[object]:
        tensor = self.grpc.InferInput("TEXT", [1], "BYTES")
        tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
        return [tensor]

    def ask(self, model: str, text: str) -> str:
        return self.client.infer(model, self._input(text)).as_numpy("TEXT")[0].decode()

    def stream(self, count: int, gate: Path) -> None:
        def hear(result: object, error: Exception | None) -> None:
            with self._news:
                if error:
                    self.errors.append(error)
                else:
                    self.texts.append(result.as_numpy("TEXT")[0].decode())
                self._news.notify_all()

        self.client.start_stream(hear)
        self.client.async_stream_infer("count", self._input(f"{count} {gate}"))

    def wait_for(self, count: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: len(self.texts) >= count or self.errors, 30)


def test_the_stub_runs_in_this_environment_and_sees_editable_packages(server: TritonServer) -> None:
    import tritandem

    assert Caller(server.grpc_url).ask("who", "I am") == (
        f"I am {sys.prefix} {sys.version_info[1]} {tritandem.__file__}"
    )


def test_administration_over_the_network_is_refused(server: TritonServer) -> None:
    from tritonclient.utils import InferenceServerException

    client = Caller(server.grpc_url).client
    for call in (client.get_model_repository_index, client.get_system_shared_memory_status):
        with pytest.raises(InferenceServerException, match="restricted"):
            call()


def test_a_drain_lets_running_streams_finish_and_refuses_new_requests(server: TritonServer, tmp_path: Path) -> None:
    from tritonclient.utils import InferenceServerException

    caller = Caller(server.grpc_url)
    gate = tmp_path / "gate"
    caller.stream(20, gate)
    caller.wait_for(1)
    server.drain()
    with suppress(InferenceServerException):
        for _ in range(100_000):  # it hears of the drain in a moment
            caller.ask("who", "too late")
    assert not server.is_ready()
    assert caller.texts == ["0"]
    gate.touch()
    # The client keeps its stream open: Triton alone would wait for it for ever.
    assert server.stop(unload_s=2.0) == 0
    assert caller.texts == [str(number) for number in range(20)]


def test_nothing_is_left_of_a_server_that_was_killed(repository: Path) -> None:
    regions = set(Path("/dev/shm").iterdir())
    with make(repository) as server:
        leader = os.getsid(server.pid)
        assert len(stub_models(server.pid)) == 3
        os.kill(server.pid, signal.SIGKILL)
        assert server.stop() == 128 + signal.SIGKILL
    assert not Path(f"/proc/{leader}").exists()
    assert not [path for path in set(Path("/dev/shm").iterdir()) - regions if path.name.startswith(server.shm_prefix)]


def test_a_killed_model_process_brings_a_fresh_server(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "STUB_GRACE_S", 0.5)
    monkeypatch.setattr(supervisor, "SICK_UNLOAD_S", 0.5)
    said: list[str] = []
    pids: list[int] = []

    def on_ready(server: TritonServer) -> None:
        pids.append(server.pid)
        if len(pids) == 1:
            stubs = Path(f"/proc/{server.pid}/task").glob("*/children")
            os.kill(int(next(c for c in (path.read_text().split() for path in stubs) if c)[0]), signal.SIGKILL)
        else:
            assert Caller(server.grpc_url).ask("who", "back").startswith("back ")
            signal.raise_signal(signal.SIGTERM)

    policy = RestartPolicy(first_delay_s=0.05)
    assert Supervisor(lambda: make(repository), policy, said.append).run(on_ready) == 0
    assert len(set(pids)) == 2
    assert any("model processes have died" in line for line in said)


@pytest.mark.parametrize(
    ("how", "seen"),
    [
        ("a lock that nobody lets go of", "the process of hang hangs: a call has taken more than 1 s: killed"),
        ("an interpreter that nobody lets go of", "the process of hang has given no sign of life for "),
    ],
)
def test_a_model_process_that_hangs_brings_a_fresh_server(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, seen: str
) -> None:
    monkeypatch.setattr(supervisor, "STUB_GRACE_S", 0.5)
    monkeypatch.setattr(supervisor, "SICK_UNLOAD_S", 0.5)
    config = tmp_path / "watch.toml"
    config.write_text("[watch]\nsilent_s = 3\n")
    said: list[str] = []
    callers: list[threading.Thread] = []

    def ask(url: str) -> None:
        from tritonclient.utils import InferenceServerException

        with suppress(InferenceServerException):
            Caller(url).ask("hang", how)

    def on_ready(server: TritonServer) -> None:
        if callers:
            assert Caller(server.grpc_url).ask("hang", "back") == "back"
            signal.raise_signal(signal.SIGTERM)
            return
        callers.append(threading.Thread(target=ask, args=(server.grpc_url,)))
        callers[0].start()

    def start() -> TritonServer:
        return make(repository, engine_config=config, say=said.append)

    assert Supervisor(start, RestartPolicy(first_delay_s=0.05), said.append).run(on_ready) == 0, said
    callers[0].join(60)
    assert not callers[0].is_alive()
    assert any(line.startswith(seen) for line in said)


def test_a_first_start_that_hangs_is_noticed_and_tried_again(tmp_path: Path) -> None:
    version = tmp_path / "repository" / "slow" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version / "model.py").write_text(HANG_AT_START.replace("BEGUN", str(tmp_path / "begun")))
    said: list[str] = []
    policy = RestartPolicy(first_delay_s=0.05)

    def start() -> TritonServer:
        return make(version.parents[1], say=said.append)

    assert Supervisor(start, policy, said.append).run(lambda server: signal.raise_signal(signal.SIGTERM)) == 0, said
    assert "the process of slow hangs: loading has taken more than 1 s: killed" in said
    assert sum(line.startswith("restart ") for line in said) == 1
