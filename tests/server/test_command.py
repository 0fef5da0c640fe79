"""Command line, environment, layout, repository and log of a server, without starting one."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tritandem.host import Refusal, cache_root
from tritandem.server import command
from tritandem.server.layout import backend_folder
from tritandem.server.locate import TritonInstall
from tritandem.server.logfile import LogReader, explain_failure, progress
from tritandem.server.model_config import read_config
from tritandem.server.options import ServeOptions, flag_names
from tritandem.server.repository import engine_devices, model_names, repository_of_run

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"


@pytest.fixture
def wheel(tmp_path: Path) -> TritonInstall:
    """The parts of an installed wheel: a backend without a stub, stubs beside it."""
    backend = tmp_path / "site" / "backends" / "python"
    backend.mkdir(parents=True)
    (backend / "libtriton_python.so").write_text("library")
    stub = tmp_path / "site" / "stubs" / "triton_python_backend_stub"
    stub.parent.mkdir()
    stub.write_text("stub")
    return TritonInstall(tmp_path / "tritonserver", backend.parent, tmp_path, stub, (Path("/wheel/libs"),), True, True)


def flags(options: ServeOptions, install: TritonInstall) -> list[str]:
    return command.arguments(options, install, Path("/backends"), Path("/repository"), "prefix_", "secret")


def test_services_listen_on_loopback_and_administration_is_locked(wheel: TritonInstall) -> None:
    words = flags(ServeOptions(None, Path("/repository")), wheel)
    for service in ("http", "grpc", "metrics"):
        assert f"--{service}-address=127.0.0.1" in words
    for restriction in ("http-restricted-api", "grpc-restricted-protocol"):
        word = next(w for w in words if w.startswith(f"--{restriction}="))
        assert "shared-memory" in word
        assert "model-repository" in word
        assert "inference" not in word
        assert word.endswith("=secret")


def test_flags_of_the_users_come_last_and_replace_ours(wheel: TritonInstall) -> None:
    options = ServeOptions(
        None, Path("/repository"), extra_flags=("--log-verbose=1", "--backend-config=python,a=b", "--grpc-port", "5")
    )
    words = flags(options, wheel)
    assert [w for w in words if w.startswith("--log-verbose")] == ["--log-verbose=1"]
    assert len([w for w in words if w.startswith("--backend-config")]) == 3
    assert [w for w in words if w.startswith("--grpc-port")] == ["--grpc-port"]
    assert words[-4:] == list(options.extra_flags)


def test_flag_names_are_read_in_both_spellings() -> None:
    assert flag_names(("--log-verbose=1", "--grpc-port", "5", "-x")) == {"log-verbose", "grpc-port"}


def test_stubs_find_the_running_python_first_and_the_wheels_libraries(wheel: TritonInstall) -> None:
    inherited = {
        "PATH": "/usr/bin",
        "LD_LIBRARY_PATH": "/mine",
        "TRITANDEM_CONFIG": "/stale",
        "TRITANDEM_GENERATION_CONFIG": "auto",
        "CUDA_VISIBLE_DEVICES": "1",
    }
    env = command.environment(ServeOptions(Path("/model"), Path("/repository")), wheel, inherited)
    assert env["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/usr/bin"]
    assert env["LD_LIBRARY_PATH"].split(os.pathsep) == ["/wheel/libs", "/mine"]
    assert env["TRITANDEM_MODEL"] == "/model"
    assert "TRITANDEM_CONFIG" not in env
    assert "TRITANDEM_GENERATION_CONFIG" not in env
    assert env["CUDA_VISIBLE_DEVICES"] == "1"
    chosen = ServeOptions(None, Path("/repository"), generation_config="none")
    assert command.environment(chosen, wheel, inherited)["TRITANDEM_GENERATION_CONFIG"] == "none"
    chosen = ServeOptions(None, Path("/repository"), quantization="fp8", kv_dtype="fp8_e4m3")
    env = command.environment(chosen, wheel, inherited)
    assert (env["TRITANDEM_QUANTIZATION"], env["TRITANDEM_KV_DTYPE"]) == ("fp8", "fp8_e4m3")


@pytest.mark.parametrize(("host", "url"), [("127.0.0.1", "127.0.0.1:1"), ("0.0.0.0", "127.0.0.1:1"), ("::", "[::1]:1")])
def test_clients_on_this_machine_get_an_address_they_can_reach(host: str, url: str) -> None:
    assert ServeOptions(None, Path("/"), host=host).url(1) == url


def test_the_layout_is_made_once_however_many_start_together(wheel: TritonInstall, tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = set(pool.map(lambda _: backend_folder(wheel, tmp_path / "cache"), range(16)))
    (folder,) = folders
    assert os.access(folder / "python" / "triton_python_backend_stub", os.X_OK)
    assert (folder / "python" / "libtriton_python.so").read_text() == "library"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_another_stub_gets_another_layout(wheel: TritonInstall, tmp_path: Path) -> None:
    first = backend_folder(wheel, tmp_path / "cache")
    wheel.stub.write_text("a newer stub")
    assert backend_folder(wheel, tmp_path / "cache") != first


def test_an_unwritable_cache_is_refused(wheel: TritonInstall, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Refusal, match=r"cannot lay out .*XDG_CACHE_HOME"):
        backend_folder(wheel, tmp_path / "file")


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_root() == Path("/somewhere/tritandem")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_root() == Path.home() / ".cache" / "tritandem"


def test_the_projects_models_are_found() -> None:
    assert {"engine", "ensemble", "scheduler", "tokenizer"} <= set(model_names(REPOSITORY))
    assert set(model_names(REPOSITORY)) == {path.parent.name for path in REPOSITORY.glob("*/config.pbtxt")}


def test_tokenizer_instances_go_into_a_copy(tmp_path: Path) -> None:
    assert repository_of_run(REPOSITORY, tmp_path) == REPOSITORY
    copy = repository_of_run(REPOSITORY, tmp_path, tokenizer_instances=3)
    changed, wanted = read_config(copy / "tokenizer"), read_config(REPOSITORY / "tokenizer")
    [group] = changed.instance_group
    assert (group.count, group.kind) == (3, group.KIND_CPU)
    wanted.instance_group[0].count = 3
    assert changed == wanted
    assert model_names(copy) == model_names(REPOSITORY)
    assert (copy / "engine" / "config.pbtxt").read_text() == (REPOSITORY / "engine" / "config.pbtxt").read_text()


def test_a_repository_without_a_tokenizer_cannot_have_more_of_them(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="--tokenizer-instances"):
        repository_of_run(tmp_path, tmp_path / "run", tokenizer_instances=2)


def test_every_device_has_an_engine_and_its_relay_in_a_copy(tmp_path: Path) -> None:
    copy = repository_of_run(REPOSITORY, tmp_path, devices=("cuda:1", "cuda:0", "cuda:3"))
    added = {"engine_2", "engine_2_calls", "engine_3", "engine_3_calls"}
    assert set(model_names(copy)) == set(model_names(REPOSITORY)) | added
    assert engine_devices(copy) == {"engine": "cuda:1", "engine_2": "cuda:0", "engine_3": "cuda:3"}
    for name in added:
        assert read_config(copy / name).name == name
        assert (copy / name / "1" / "model.py").is_file()
    assert read_config(copy / "scheduler").parameters["engines"].string_value == "engine, engine_2, engine_3"


def test_a_repository_whose_engines_are_its_own_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"no model 'scheduler'.*--devices"):
        repository_of_run(tmp_path, tmp_path / "run", devices=("cpu",))
    own = repository_of_run(REPOSITORY, tmp_path / "own", devices=("cpu", "cpu"))
    with pytest.raises(Refusal, match="'engine_2' already"):
        repository_of_run(own, tmp_path / "again", devices=("cpu", "cpu"))


def model_with(tmp_path: Path, config: str) -> Path:
    folder = tmp_path / "repository" / "second"
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(config)
    return folder.parent


@pytest.mark.parametrize(
    ("config", "devices"),
    [
        ('parameters: [ { key: "device", value: { string_value: "cuda:1" } } ]', {"second": "cuda:1"}),
        ("parameters {\n  key: 'device'\n  value {\n    string_value: 'cuda:1' # here\n  }\n}", {"second": "cuda:1"}),
        ('# parameters { key: "device" value { string_value: "cuda:1" } }', {}),
        ('parameters { key: "device" value { string_value: "" } }', {}),
    ],
)
def test_a_device_is_read_in_whatever_form_the_file_has(tmp_path: Path, config: str, devices: dict[str, str]) -> None:
    assert engine_devices(model_with(tmp_path, config)) == devices


@pytest.mark.parametrize(
    ("config", "reason"), [("name: 3", "1:7 : .*string"), ("nonsense: 3", 'no field named "nonsense"'), ("a\xff", "")]
)
def test_a_configuration_that_is_none_is_refused_by_its_name(tmp_path: Path, config: str, reason: str) -> None:
    repository = model_with(tmp_path, "")
    (repository / "second" / "config.pbtxt").write_bytes(config.encode("latin-1"))
    with pytest.raises(Refusal, match=rf"second/config.pbtxt: .*{reason}"):
        engine_devices(repository)


def test_reading_configurations_brings_neither_grpc_nor_numpy() -> None:
    code = (
        "import sys; from pathlib import Path; from tritandem.server.repository import engine_devices;"
        f"engine_devices(Path({str(REPOSITORY)!r})); print(*{{'grpc', 'numpy'}} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


def test_the_log_is_read_in_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    reader = LogReader(path)
    assert list(reader.new_lines()) == []
    path.write_text("one\ntw")
    assert list(reader.new_lines()) == ["one"]
    path.write_text("one\ntwo\n")
    assert list(reader.new_lines()) == ["two"]
    path.write_text("cut\n")
    assert list(reader.new_lines()) == ["cut"]


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("I1129 13:24:01.123456 12 model_lifecycle.cc:849] \"successfully loaded 'engine'\"", "engine is loaded"),
        ('I1129 13:24:01.123456 12 model_lifecycle.cc:472] "loading: engine:1"', "loading engine"),
        ('I1129 13:24:01.123456 12 model.py:7] "reading weights"', "reading weights"),
        ('W1129 13:24:01.123456 12 metrics.cc:7] "no DCGM"', None),
        ('E1129 13:24:01.123456 12 server.cc:7] "it broke"', "it broke"),
        (
            'E1129 13:24:01.123456 12 backend.cc:7] "ERROR: Failed to create instance: no weights\\n\\nAt:\\n  a.py"',
            None,
        ),
        ("E1129 13:24:01.123456 12 model_lifecycle.cc:642] \"failed to load 'engine' version 1: no weights\"", None),
        ('I1129 13:24:01.123456 12 server.cc:7] "chatter"', None),
        ('E1129 13:24:01.123456 12 server.cc:241] "CudaDriverHelper has not been initialized."', None),
        ("| engine | 1 | READY |", None),
    ],
)
def test_progress_shows_what_a_waiting_person_wants_to_know(line: str, shown: str | None) -> None:
    assert progress(line) == shown


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (
            "E1129 13:24:01.1 12 model_lifecycle.cc:642] \"failed to load 'engine' version 1: Internal: no weights\"\n"
            'E1129 13:24:01.2 12 main.cc:1] "creating server"',
            "model engine: Internal: no weights",
        ),
        (
            "E1129 13:24:01.1 12 model_lifecycle.cc:642] \"failed to load 'engine' version 1: Internal: ConfigError: "
            'no weights: ask\\n\\nAt:\\n  /a/loader.py(140): _build\\n  /a/start.py(84): start_engine\\n"\n',
            "model engine: Internal: ConfigError: no weights: ask",
        ),
        ("error: unrecognized option '--x'\nUsage: ...", "error: unrecognized option '--x'"),
        ("something else\n\n", "something else"),
        ("", "the log is empty"),
    ],
)
def test_a_failure_is_explained_by_its_first_cause(log: str, reason: str) -> None:
    assert explain_failure(log) == reason
