"""Every start that cannot succeed is refused with what is wrong and what to do."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest
from tritandem.config import Config
from tritandem.contracts.errors import ConfigError
from tritandem.host import Refusal
from tritandem.machine.device import DeviceGroup
from tritandem.server import preflight
from tritandem.server.foreign_flags import known_flags, refuse_unknown_flags
from tritandem.server.locate import check_python, find_install, stub_python
from tritandem.server.options import ServeOptions
from tritandem.server.preflight import why_not_bindable
from tritandem.telemetry import tracing

from tests.fakes.ports import free_ports


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\x02" + bytes(7) + b"{}")  # of no weights
    return folder


def test_a_complete_model_folder_passes(model_folder: Path) -> None:
    preflight.refuse_model_folder(model_folder)


def test_a_missing_model_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"absent does not exist: give --model"):
        preflight.refuse_model_folder(tmp_path / "absent")


@pytest.mark.parametrize(
    ("file", "what"),
    [("config.json", "no config.json"), ("model.safetensors", "no weights"), ("tokenizer.json", "no tokenizer")],
)
def test_each_missing_part_of_a_model_is_named(model_folder: Path, file: str, what: str) -> None:
    (model_folder / file).unlink()
    with pytest.raises(Refusal, match=what):
        preflight.refuse_model_folder(model_folder)


def test_an_empty_file_is_no_model(model_folder: Path) -> None:
    (model_folder / "model.safetensors").write_text("")
    with pytest.raises(Refusal, match="no weights"):
        preflight.refuse_model_folder(model_folder)


def test_random_weights_need_no_weight_files(model_folder: Path) -> None:
    (model_folder / "model.safetensors").unlink()
    preflight.refuse_model_folder(model_folder, needs_weights=False)


def test_a_quantized_model_is_not_quantized_again(model_folder: Path, tmp_path: Path) -> None:
    (model_folder / "config.json").write_text('{"quantization_config": {"quant_method": "awq", "bits": 4}}')
    config = tmp_path / "engine.toml"
    config.write_text('[engine]\nquantization = "fp8"\n')
    preflight.check_model(ServeOptions(model_folder, Path("/")))
    with pytest.raises(
        ConfigError, match=r"engine\.quantization: given fp8, allowed: none; .* quantized already, by awq"
    ):
        preflight.check_model(ServeOptions(model_folder, Path("/"), engine_config=config))
    preflight.check_model(ServeOptions(model_folder, Path("/"), engine_config=config, quantization="none"))
    with pytest.raises(ConfigError, match=r"engine\.quantization: given int4, allowed: none"):
        preflight.check_model(ServeOptions(model_folder, Path("/"), quantization="int4"))


def test_too_few_open_files_are_refused_and_few_are_said() -> None:
    with pytest.raises(Refusal, match="256 files may be open, 512 are needed: raise the hard limit"):
        preflight.refuse_descriptors(256)
    preflight.refuse_descriptors(512)
    assert preflight.connections_left(1024, Config()).startswith("room for 768 connections, and scheduler.max_queued")
    assert preflight.connections_left(4096 + 256, Config()) == ""


def test_no_host_is_not_every_host() -> None:
    with pytest.raises(Refusal, match="--host: given '': allowed: an address"):
        preflight.check_ports(ServeOptions(None, Path("/"), host=""))


def test_a_busy_port_is_named_with_its_flag() -> None:
    free = free_ports(2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = ServeOptions(None, Path("/"), http_port=free[0], grpc_port=port, metrics_port=free[1])
        with pytest.raises(Refusal, match=f"port {port} on 127.0.0.1 cannot be used .*--grpc-port"):
            preflight.check_ports(options)


def test_one_port_for_two_services_is_refused() -> None:
    port = free_ports(1)[0]
    with pytest.raises(Refusal, match="--http-port and --grpc-port are both"):
        preflight.check_ports(ServeOptions(None, Path("/"), http_port=port, grpc_port=port))


def test_an_address_of_another_machine_is_refused() -> None:
    assert why_not_bindable("192.0.2.1", free_ports(1)[0])


def test_too_little_shared_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"MiB free, 1073741824 MiB are needed: .*--shm-size"):
        preflight.refuse_shared_memory(tmp_path, needed_bytes=1 << 50)


@pytest.mark.parametrize(
    ("version", "corrupts", "refused"), [("1.26.4", True, False), ("2.1.0", True, True), ("2.1.0", False, False)]
)
def test_numpy_2_is_refused_only_where_the_stub_corrupts_tensors(version: str, corrupts: bool, refused: bool) -> None:
    if refused:
        with pytest.raises(Refusal, match=r"numpy 2.1.0 .*pip install 'numpy>=1.26,<2'"):
            preflight.refuse_numpy(version, corrupts)
    else:
        preflight.refuse_numpy(version, corrupts)


@pytest.mark.parametrize("version", [(3, 9), (3, 13), (3, 14)])
def test_an_unsupported_python_is_refused(version: tuple[int, int]) -> None:
    with pytest.raises(Refusal, match=r"Python 3\.\d+ is not supported .*use Python 3.10, 3.11 or 3.12"):
        check_python(version)


def test_without_a_server_binary_both_places_are_named(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"tritonserver does not exist; .*: install the wheel"):
        find_install(tmp_path / "absent", tmp_path / "pytriton")


def test_an_installation_for_another_python_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    stub = tmp_path / "backends" / "python" / "triton_python_backend_stub"
    stub.parent.mkdir(parents=True)
    stub.write_bytes(b"\x7fELF...libpython3.7.so.1.0...")
    assert stub_python(stub) == (3, 7)
    with pytest.raises(Refusal, match=r"is built for Python 3.7, this is 3\."):
        find_install(tmp_path, tmp_path / "pytriton")


def test_a_named_installation_is_used_and_no_other_stands_in_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITANDEM_TRITON_ROOT", str(tmp_path))
    with pytest.raises(Refusal, match=r"TRITANDEM_TRITON_ROOT names no usable .*bin/tritonserver does not"):
        find_install()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub = tmp_path / "backends" / "python" / "triton_python_backend_stub"
    for path, text in ((tmp_path / "bin" / "tritonserver", ""), (stub, f"libpython{version}.so.1.0")):
        path.parent.mkdir(parents=True)
        path.write_text(text)
    install = find_install()
    assert (install.binary, install.backends) == (tmp_path / "bin/tritonserver", tmp_path / "backends")
    assert not install.needs_layout


def test_a_wrong_configuration_key_is_named(tmp_path: Path) -> None:
    config = tmp_path / "engine.toml"
    config.write_text("[engine]\nblock_tokns = 16\n")
    with pytest.raises(ConfigError, match="block_tokns"):
        preflight.check_engine_config(ServeOptions(None, Path("/"), engine_config=config))


@pytest.mark.parametrize(
    ("devices", "problem"),
    [
        (("cuda:0", "cuda:0"), "given cuda:0,cuda:0: allowed: cpu, or cuda:N with each GPU once"),
        (("cuda", "cuda:1"), "given cuda,cuda:1: allowed: cpu, or cuda:N with each GPU once"),
        (("auto", "auto"), "given auto,auto: allowed: cpu, or cuda:N with each GPU once"),
        (("cuda:0+cuda:1", "cuda:1+cuda:2"), "given cuda:0+cuda:1,cuda:1+cuda:2: allowed: cpu, or"),
        (("cuda:0+cuda:7",), "given 'cuda:0+cuda:7', but this process may use 1 GPU"),
        (("cuda:0", "cuda:7"), "given 'cuda:7', but this process may use 1 GPU"),
    ],
)
def test_devices_of_engines_are_looked_at_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: tuple[str, ...], problem: str
) -> None:
    monkeypatch.setattr(
        preflight, "why_no_device", lambda device: "this process may use 1 GPU" if device.index == 7 else None
    )
    with pytest.raises(Refusal, match=f"--devices: {re.escape(problem)}"):
        preflight.check_devices(ServeOptions(None, tmp_path, devices=tuple(map(DeviceGroup.parse, devices))))
    several = tuple(map(DeviceGroup.parse, ("cpu", "cpu", "cpu+cpu", "cuda:0+cuda:0", "cuda:1+cuda:2")))
    preflight.check_devices(ServeOptions(None, tmp_path, devices=several))


def test_ranks_on_gpus_that_are_apart_are_refused_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "why_no_device", lambda _: None)
    monkeypatch.setattr(
        preflight, "why_apart", lambda gpus: "GPU 0 cannot read GPU 1; an IOMMU is on" if len(set(gpus)) > 1 else None
    )
    for devices in ("cpu+cpu", "cuda:0+cuda:0", "cuda:1"):
        preflight.check_devices(ServeOptions(None, tmp_path, devices=(DeviceGroup.parse(devices),)))
    with pytest.raises(Refusal, match=r"--devices: given 'cuda:0\+cuda:1', but GPU 0 cannot read GPU 1; an IOMMU"):
        preflight.check_devices(ServeOptions(None, tmp_path, devices=(DeviceGroup.parse("cuda:0+cuda:1"),)))


@pytest.mark.parametrize(
    ("device", "problem"),
    [("cuda:7", "this process may use 1 GPU"), ("tpu", "given 'tpu': allowed: auto, cpu, cuda, cuda:N")],
)
def test_an_engine_on_a_device_that_is_not_there_is_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, problem: str
) -> None:
    monkeypatch.setattr(
        preflight, "why_no_device", lambda device: "this process may use 1 GPU" if device.index == 7 else None
    )
    second = tmp_path / "second"
    second.mkdir()
    (second / "config.pbtxt").write_text(
        f'# parameters {{ key: "device" value {{ string_value: "no" }} }}\n'
        f'parameters {{ key: "device" value {{ string_value: "{device}" }} }}\n'
    )
    with pytest.raises(Refusal, match=rf"second/config.pbtxt, parameter device: .*{problem}"):
        preflight.check_devices(ServeOptions(None, tmp_path))
    (second / "config.pbtxt").write_text('parameters { key: "device" value { string_value: "" } }\n')
    preflight.check_devices(ServeOptions(None, tmp_path))


KNOWN = ("log-verbose", "log-info", "trace-config", "grpc-port")


@pytest.mark.parametrize(
    "words", [("--log-verbose=1",), ("--log-verbose", "1", "--trace-config=level=OFF"), ("--grpc-po=5",), ()]
)
def test_flags_that_triton_has_pass(words: tuple[str, ...]) -> None:
    refuse_unknown_flags(words, KNOWN)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--bogus-flag",), "unknown flag '--bogus-flag': neither `tritandem serve` nor tritonserver has it"),
        (("--log-verbos=1", "--log_info=1"), r"unknown flag '--log_info=1': .*: did you mean --log-info\?"),
        (("-x",), "unknown flag '-x'"),
        (("--log-verbose=1", "2"), "unexpected argument '2': flags look like --name=value"),
        (("model",), "unexpected argument 'model'"),
    ],
)
def test_flags_that_nobody_has_are_named(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        refuse_unknown_flags(words, KNOWN)


def test_a_binary_that_does_not_tell_its_flags_is_believed(fake_install) -> None:
    assert known_flags(fake_install) == frozenset()
    preflight.check_flags(ServeOptions(None, Path(), extra_flags=("--of-a-later-triton=1",)))


@pytest.mark.skipif(Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists(), reason="this machine may have a GPU")
def test_a_gpu_is_refused_on_a_machine_without_one(tmp_path: Path) -> None:
    config = tmp_path / "engine.toml"
    config.write_text("[engine]\ndevice = 'cuda:7'\n")
    with pytest.raises(Refusal, match=r"engine.device: given 'cuda:7', but there is no NVIDIA driver"):
        preflight.check_devices(ServeOptions(None, tmp_path, engine_config=config))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("engine=0-8191", "placement.engine: given '0-8191', allowed: CPUs among"),
        ("kernel=0", "placement.kernel: unknown key"),
        ("often", "placement: given 'often', allowed: auto, off"),
    ],
)
def test_a_placement_that_this_machine_cannot_have_is_named(placement: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        preflight.check_placement(ServeOptions(None, Path(), placement=placement))


def test_spans_without_their_packages_are_refused_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tritandem.toml"
    file.write_text('[telemetry]\ntraces_url = "http://collector:4318/v1/traces"\n')
    preflight.check_tracing(ServeOptions(None, Path(), engine_config=file))
    monkeypatch.setattr(tracing, "PACKAGES", ("a_package_that_nobody_has",))
    with pytest.raises(ConfigError, match=r"telemetry\.traces_url"):
        preflight.check_tracing(ServeOptions(None, Path(), engine_config=file))


def test_a_repository_without_models_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="holds no model"):
        preflight.check_repository(ServeOptions(None, tmp_path))
    with pytest.raises(Refusal, match="is not a folder"):
        preflight.check_repository(ServeOptions(None, tmp_path / "absent"))


def test_what_is_wrong_with_the_configuration_is_said_once(fake_install, tmp_path: Path) -> None:
    config = tmp_path / "engine.toml"
    config.write_text("[engine]\ndevice = 'tpu'\n")
    said = [str(error) for _, error in preflight.findings(ServeOptions(None, tmp_path, engine_config=config)) if error]
    assert sum("given 'tpu'" in words for words in said) == 1
    assert said.count("not checked: fix the configuration file first") >= 3


def test_findings_go_on_after_a_refusal(fake_install, tmp_path: Path) -> None:
    results = dict(preflight.findings(ServeOptions(tmp_path / "absent", tmp_path / "nothing")))
    assert results["model folder"] is not None
    assert results["model repository"] is not None
    assert results["numpy"] is None
