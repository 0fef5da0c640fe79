"""The compose files: closed by default, complete, and in step with the code."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from tritandem.cli.server_flags import OPENAI_PORT
from tritandem.config import SchedulerConfig, load_config
from tritandem.server.health import READY_PATH
from tritandem.server.launcher import UNLOAD_S
from tritandem.server.options import ServeOptions
from tritandem_loadtest.locust_run import options as locust_options

from tests.docker.deployment_files import COMPOSE_FILES, DOCKER, ROOT, read_yaml

SERVICES = [
    (path.name, name, service)
    for path in COMPOSE_FILES
    for name, service in read_yaml(path)["services"].items()
    if "image" in service and path.name != "compose.gpu.yaml"  # that one only changes what compose.yaml hardened
]
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
MADE_BY_THE_OPERATOR = {"./proxy/keys.map", "./proxy/certificates"}


def resolved(text: str) -> str:
    """With the default of every variable."""
    return VARIABLE.sub(lambda match: match[2] or "", text)


def substituted(value: Any) -> Any:
    """A whole file as Compose reads it with no variable set."""
    if isinstance(value, dict):
        return {key: substituted(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [substituted(inner) for inner in value]
    return resolved(value) if isinstance(value, str) else value


def check_against_the_specification(document: dict[str, Any]) -> None:
    """Raises ValueError for anything that the Compose Specification does not know: keys, types, durations, ports."""
    from compose_spec import PyCompose

    PyCompose.from_json(json.dumps(document)).validate()


needs_compose_spec = pytest.mark.skipif(
    importlib.util.find_spec("compose_spec") is None, reason="compose-spec (PyPI) is not installed"
)


def server() -> dict[str, Any]:
    service: dict[str, Any] = read_yaml(DOCKER / "compose.yaml")["services"]["server"]
    return service


@pytest.mark.parametrize(
    ("file", "name", "service"), SERVICES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_services_have_no_privileges_and_cannot_write_their_image(
    file: str, name: str, service: dict[str, Any]
) -> None:
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert not service.get("privileged")
    assert ":" in service["image"]
    assert not service["image"].endswith(":latest")


@needs_compose_spec
@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda p: p.name)
def test_files_are_what_the_compose_specification_allows(path: Path) -> None:
    check_against_the_specification(substituted(read_yaml(path)))


@needs_compose_spec
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("heathcheck", {"test": "true"}),
        ("ports", ["abc:80"]),
        ("restart", "sometimes"),
        ("stop_grace_period", "45 moons"),
        ("depends_on", {"prometheus": {"condition": "service_happy"}}),
        ("shm_size", ["1gb"]),
    ],
)
def test_the_check_of_compose_files_sees_mistakes(key: str, value: object) -> None:
    document = copy.deepcopy(substituted(read_yaml(DOCKER / "compose.yaml")))
    document["services"]["server"][key] = value
    with pytest.raises(ValueError, match=r".+"):
        check_against_the_specification(document)


def test_services_wait_for_services_that_exist() -> None:
    base = set(read_yaml(DOCKER / "compose.yaml")["services"])
    for path in COMPOSE_FILES:
        services = read_yaml(path)["services"]
        for service in services.values():
            assert set(service.get("depends_on", ())) <= base | set(services)


def test_ports_answer_this_machine_only_unless_told_otherwise() -> None:
    published = [port for _, _, service in SERVICES for port in service.get("ports", ())]
    published += read_yaml(DOCKER / "compose.tls.yaml")["services"]["server"]["ports"]
    assert len(published) >= 7
    for port in published:
        assert resolved(port).startswith("127.0.0.1:"), port


def test_published_ports_are_those_that_the_server_listens_on() -> None:
    inside = [int(resolved(port).rsplit(":", 1)[1]) for port in server()["ports"]]
    assert inside == list(ServeOptions(None, Path(), openai_port=OPENAI_PORT).ports().values())
    assert READY_PATH in server()["healthcheck"]["test"][-1]


def test_prometheus_scrapes_the_metrics_port_and_grafana_finds_both() -> None:
    scrapes = read_yaml(DOCKER / "prometheus/prometheus.yaml")["scrape_configs"]
    ports = (ServeOptions(None, Path()).metrics_port, OPENAI_PORT)
    assert [scrape["static_configs"][0]["targets"] for scrape in scrapes] == [[f"server:{port}"] for port in ports]
    grafana = read_yaml(DOCKER / "compose.yaml")["services"]["grafana"]
    mounts = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    [provider] = read_yaml(DOCKER / "grafana/provisioning/dashboards/tritandem.yaml")["providers"]
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]
    home = Path(grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert (DOCKER / "grafana/dashboards" / home.name).exists()


def test_everything_that_is_mounted_exists_or_is_declared() -> None:
    for path in COMPOSE_FILES:
        declared = set(read_yaml(DOCKER / "compose.yaml")["volumes"])
        for name, service in read_yaml(path)["services"].items():
            for volume in service.get("volumes", ()):
                source = resolved(volume).split(":")[0]
                known = source in declared or source in MADE_BY_THE_OPERATOR or (DOCKER / source).exists()
                assert known, f"{path.name}, {name}: {source}"
            for build in filter(None, [service.get("build")]):
                assert (DOCKER / build["context"] / build["dockerfile"]).exists()


def test_every_variable_is_explained_with_the_default_that_it_has() -> None:
    example = dict(
        line.split("=", 1)
        for line in (DOCKER / ".env.example").read_text().splitlines()
        if line and not line.startswith("#")
    )
    used: dict[str, set[str]] = {}
    for path in COMPOSE_FILES:
        for name, default in VARIABLE.findall(path.read_text()):
            used.setdefault(name, set()).add(default)
    assert set(used) == set(example)
    for name, defaults in used.items():
        assert example[name] in defaults, f"{name}: {example[name]} is not what compose falls back to, {defaults}"


def test_the_mounted_configuration_is_one_that_the_server_reads() -> None:
    assert load_config(DOCKER / "tritandem.toml").scheduler.drain_timeout_s == SchedulerConfig().drain_timeout_s


def test_a_stop_leaves_time_to_drain_and_to_unload() -> None:
    grace_s = float(server()["stop_grace_period"].removesuffix("s"))
    assert grace_s > ServeOptions(None, Path()).drain_timeout_s + UNLOAD_S


def test_shared_memory_is_raised_above_what_the_server_refuses() -> None:
    assert resolved(server()["shm_size"]) == "1gb"


def test_the_page_to_chat_on_asks_the_api_and_fetches_nothing() -> None:
    webui = read_yaml(DOCKER / "compose.yaml")["services"]["webui"]
    asked = webui["environment"]
    assert asked["OPENAI_API_BASE_URL"] == f"http://server:{OPENAI_PORT}/v1"
    tried = runpy.run_path(str(ROOT / "tools/ecosystem/programs/with_open_webui.py"), run_name="settings")["SETTINGS"]
    same = asked.keys() & tried.keys() - {"OPENAI_API_BASE_URL", "OPENAI_API_KEY"}
    assert same >= {"ENABLE_OLLAMA_API", "WEBUI_AUTH", "OFFLINE_MODE", "HF_HUB_OFFLINE", "RAG_EMBEDDING_ENGINE"}
    assert {name: asked[name] for name in same} == {name: tried[name] for name in same}


def test_flags_of_the_load_generator_exist() -> None:
    command = read_yaml(DOCKER / "compose.yaml")["services"]["locust"]["command"]
    known = {"--host"} | {"--" + name.replace("_", "-") for name in locust_options.FIELDS}
    assert {word for word in command if word.startswith("--")} <= known


def test_the_gpu_file_reserves_one_gpu_for_the_server() -> None:
    gpu = read_yaml(DOCKER / "compose.gpu.yaml")["services"]["server"]
    [device] = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["capabilities"] == ["gpu"]
    assert len(device["device_ids"]) == 1
