"""The Helm chart: values that templates use exist, and what is rendered is valid and in step with the code.

Rendering needs Helm (the program, or the PyPI package helm-python-sdk); the schemas are those of the PyPI package
kubernetes-validate. Where they are missing the tests that need them are skipped.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tritandem.cli.server_flags import OPENAI_PORT
from tritandem.config import CONFIG_ENV, MODEL_ENV, WatchConfig, load_config
from tritandem.server import guardian
from tritandem.server.health import READY_PATH
from tritandem.server.launcher import UNLOAD_S
from tritandem.server.options import ServeOptions

from tests.docker.deployment_files import CHART, adapter_rules, read_yaml
from tests.docker.test_images import flags_of

TEMPLATES = tuple(sorted((CHART / "templates").iterdir()))
EXAMPLES = tuple(sorted(p for p in (CHART / "examples").glob("*-values.yaml") if "adapter" not in p.name))
HELM = shutil.which("helm")
HAS_HELM_SDK = importlib.util.find_spec("helm_python") is not None
KUBERNETES = "1.31"

needs_helm = pytest.mark.skipif(
    HELM is None and not HAS_HELM_SDK, reason="neither helm nor helm_python (PyPI helm-python-sdk) is installed"
)


def manifests(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Every object that the chart makes of `values`. Raises ValueError with Helm's words."""
    if HELM is not None:
        words = [HELM, "template", "demo", str(CHART), "--namespace", "llm", "--values", "-"]
        done = subprocess.run(words, input=json.dumps(values), capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise ValueError(done.stderr)
        texts = [done.stdout]
    else:
        from helm_python import Chart  # type: ignore[import-not-found]

        try:
            rendered = Chart.load(CHART).render(values=values, name="demo", namespace="llm")
        except Exception as error:
            raise ValueError(str(error)) from error
        texts = [text for name, text in rendered.items() if name.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


def of_kind(objects: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    [found] = [o for o in objects if o["kind"] == kind]
    return found


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    else:
        yield path


def has(values: Any, path: tuple[str, ...]) -> bool:
    for key in path:
        if not isinstance(values, dict) or key not in values:
            return False
        values = values[key]
    return True


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.name)
def test_every_value_that_a_template_uses_is_explained_in_values(path: Any) -> None:
    values = read_yaml(CHART / "values.yaml")
    for used in re.findall(r"\$?\.Values\.([A-Za-z.]+)", path.read_text()):
        assert has(values, tuple(used.split("."))), used


def test_every_value_is_used_by_a_template() -> None:
    text = "\n".join(path.read_text() for path in TEMPLATES)
    for path in leaves(read_yaml(CHART / "values.yaml")):
        prefixes = [".Values." + ".".join(path[:n]) for n in range(1, len(path) + 1)]
        assert any(re.search(re.escape(p) + r"(?![A-Za-z.])", text) for p in prefixes) or f".{path[-1]}" in text, path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_set_only_values_that_exist(path: Any) -> None:
    values = read_yaml(CHART / "values.yaml")
    for leaf in leaves(read_yaml(path)):
        assert has(values, leaf), leaf


def test_the_schema_knows_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())

    def described(values: Any, part: dict[str, Any], path: str) -> list[str]:
        """Paths of values that the schema lacks, and of what it has and values.yaml lacks."""
        if "properties" not in part:
            return []
        assert part["additionalProperties"] is False, path
        odd = [f"{path}.{key}" for key in set(values) ^ set(part["properties"])]
        return odd + [
            bad for key, inner in values.items() for bad in described(inner, part["properties"][key], f"{path}.{key}")
        ]

    assert described({"global": {}, **read_yaml(CHART / "values.yaml")}, schema, "") == []


def test_the_default_configuration_is_one_that_the_server_reads(tmp_path: Path) -> None:
    file = tmp_path / "tritandem.toml"
    file.write_text(read_yaml(CHART / "values.yaml")["config"])
    assert load_config(file).telemetry.metrics


def test_the_autoscaler_asks_for_what_the_adapter_offers() -> None:
    text = (CHART / "templates" / "horizontalpodautoscaler.yaml").read_text()
    assert set(re.findall(r"metric: \{name: (\w+)\}", text)) == {rule["name"]["as"] for rule in adapter_rules()}


@needs_helm
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_render_to_objects_that_kubernetes_accepts(path: Any) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="PyPI kubernetes-validate is not installed")
    objects = manifests(read_yaml(path))
    assert {"Deployment", "Service", "ConfigMap", "PodDisruptionBudget"} <= {o["kind"] for o in objects}
    for document in objects:
        if document["kind"] != "ServiceMonitor":  # a custom resource: no schema there
            validator.validate(document, KUBERNETES, strict=True)


@needs_helm
def test_a_pod_is_one_server_on_one_gpu_with_nothing_it_does_not_need() -> None:
    pod = of_kind(manifests(read_yaml(CHART / "examples" / "gpu-values.yaml")), "Deployment")["spec"]["template"][
        "spec"
    ]
    [container] = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "cpu" not in container["resources"]["limits"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    [shm] = [v for v in pod["volumes"] if v["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "2Gi"}
    [model] = [m for m in container["volumeMounts"] if m["name"] == "model"]
    assert model["readOnly"] is True


@needs_helm
def test_probes_ports_flags_and_variables_are_the_servers() -> None:
    pod = of_kind(manifests(read_yaml(CHART / "examples" / "gpu-values.yaml")), "Deployment")["spec"]["template"][
        "spec"
    ]
    [container] = pod["containers"]
    options = ServeOptions(None, CHART, openai_port=OPENAI_PORT)
    assert [port["containerPort"] for port in container["ports"]] == list(options.ports().values())
    assert container["startupProbe"]["httpGet"] == {"path": READY_PATH, "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/health/ready", "port": "openai"}
    # Whatever hangs has been ended from within, `tritandem serve` included, before the kubelet ends the pod.
    liveness, limits = container["livenessProbe"], WatchConfig()
    assert liveness["httpGet"] == {"path": "/v2/health/live", "port": "http"}
    slowest_s = max(limits.stopped_s, limits.silent_s, limits.call_s, limits.step_s, guardian.LAUNCHER_SILENCE_S)
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > slowest_s
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    assert environment.keys() == {MODEL_ENV, CONFIG_ENV}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert environment[MODEL_ENV] == mounts["model"]
    assert environment[CONFIG_ENV].startswith(mounts["config"])
    assert container["args"][:2] == ["--drain-timeout-s", "60"]


@needs_helm
def test_what_an_operator_adds_arrives() -> None:
    collector = {
        "ports": [{"port": 4318, "protocol": "TCP"}],
        "to": [{"podSelector": {"matchLabels": {"app": "otel"}}}],
    }
    values = {
        "model": {"name": "smollm2"},
        "extraArgs": ["--cpus", "engine=2-5"],
        "extraEnv": [{"name": "OTEL_SERVICE_NAME", "value": "chat"}],
        "networkPolicy": {"enabled": True, "extraEgress": [collector]},
    }
    objects = manifests(values)
    [container] = of_kind(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    assert container["args"][-2:] == ["--cpus", "engine=2-5"]
    assert {"name": "OTEL_SERVICE_NAME", "value": "chat"} in container["env"]
    assert of_kind(objects, "NetworkPolicy")["spec"]["egress"][-1] == collector


@needs_helm
def test_the_grace_period_covers_pre_stop_drain_and_unloading() -> None:
    pod = of_kind(manifests({"model": {"name": "smollm2"}}), "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    drain_s = float(container["args"][1])
    sleep_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > sleep_s + drain_s + UNLOAD_S


@needs_helm
@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "exactly one of model"),
        ({"model": {"name": "smollm2", "hostPath": "/x"}}, "exactly one of model"),
        ({"model": {"name": "smollm2"}, "gpu": {"count": 2}}, "maximum"),
        ({"model": {"name": "smollm2"}, "replica": 2}, "replica"),
        ({"model": {"name": "smollm2"}, "autoscaling": {"enable": True}}, "enable"),
        ({"model": {"name": "smollm2"}, "autoscaling": {"enabled": "yes"}}, "autoscaling"),
        ({"model": {"name": "smollm2"}, "replicas": "two"}, "replicas"),
        ({"model": {"name": "smollm2"}, "shmSize": "1 gigabyte"}, "shmSize"),
        ({"model": {"name": "smollm2"}, "service": {"ports": {"http": 70000}}}, "http"),
        ({"model": {"name": "smollm2"}, "image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"model": {"hostPath": "models"}}, "hostPath"),
        ({"model": {"name": "smollm2"}, "drainTimeoutSeconds": 0}, "drainTimeoutSeconds"),
        (
            {"model": {"name": "a"}, "serviceMonitor": {"enabled": True}, "service": {"headless": False}},
            "needs service.headless",
        ),
    ],
)
def test_values_that_cannot_work_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        manifests(values)


@needs_helm
def test_one_service_names_the_pods_and_another_balances_http() -> None:
    services = [o for o in manifests({"model": {"name": "smollm2"}}) if o["kind"] == "Service"]
    assert [service["spec"].get("clusterIP") for service in services] == ["None", None]
    for service in services:
        assert {port["name"] for port in service["spec"]["ports"]} >= {"http", "grpc", "openai"}
    assert [p["name"] for p in services[1]["spec"]["ports"]] == ["http", "grpc", "openai"]  # metrics: pod by pod


@needs_helm
def test_the_openai_api_has_its_names_its_keys_and_its_workers_or_is_not_there() -> None:
    named = {"keysSecret": "keys", "models": ["llama", "gpt-4o"], "workers": 2}
    objects = manifests({"model": {"name": "smollm2"}, "openai": named})
    pod = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    [keys] = [volume for volume in pod["volumes"] if volume["name"] == "keys"]
    assert keys["secret"] == {"secretName": "keys"}
    [mount] = [one["mountPath"] for one in container["volumeMounts"] if one["name"] == "keys"]
    front = front_flags(container["args"])
    assert front == {
        "--openai-port": [str(OPENAI_PORT)],
        "--openai-workers": ["2"],
        "--openai-model": ["llama", "gpt-4o"],
        "--openai-keys": [f"{mount}/keys.toml"],
    }
    assert front.keys() <= flags_of("serve")

    objects = manifests({"model": {"name": "smollm2"}, "openai": {"enabled": False, "keysSecret": "keys"}})
    pod = of_kind(objects, "Deployment")["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert front_flags(container["args"]) == {"--openai-port": ["0"]}
    assert container["readinessProbe"]["httpGet"] == {"path": READY_PATH, "port": "http"}
    assert "openai" not in {port["name"] for port in container["ports"]}
    assert "keys" not in {volume["name"] for volume in pod["volumes"]}
    services = [o for o in objects if o["kind"] == "Service"]
    assert "openai" not in {port["name"] for service in services for port in service["spec"]["ports"]}


def front_flags(words: list[str]) -> dict[str, list[str]]:
    """Values of the flags `--openai-...`."""
    found: dict[str, list[str]] = {}
    for name, value in itertools.pairwise(words):
        if name.startswith("--openai-"):
            found.setdefault(name, []).append(value)
    return found


@needs_helm
def test_the_autoscaler_owns_the_replicas_where_it_is_on() -> None:
    objects = manifests(read_yaml(CHART / "examples" / "gpu-values.yaml"))
    assert "replicas" not in of_kind(objects, "Deployment")["spec"]
    scaler = of_kind(objects, "HorizontalPodAutoscaler")["spec"]
    assert [m["pods"]["metric"]["name"] for m in scaler["metrics"]] == [rule["name"]["as"] for rule in adapter_rules()]
